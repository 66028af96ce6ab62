"""What of a URL may be shown: not the password, and not the query string, where access tokens stand."""

import re

_URL_IN_TEXT = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s'\"<>|]*)")


def redact(text: str) -> str:
    """A text in which every URL has lost its login, its query string and its fragment."""
    return _URL_IN_TEXT.sub(lambda found: found[1] + _redact_rest(found[2]), text)


def _redact_rest(rest: str) -> str:
    rest, fragment, _ = rest.partition("#")
    rest, question, _ = rest.partition("?")
    host, slash, path = rest.partition("/")
    _, at, host = host.rpartition("@")
    return ("***@" if at else "") + host + slash + path + ("?***" if question else "") + ("#***" if fragment else "")
