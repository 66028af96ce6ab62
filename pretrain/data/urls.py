"""Names of places: which schemes are allowed, and how a file's name joins a folder's."""

import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pretrain.errors import UserError
from pretrain.redaction import redact

REMOTE_SCHEMES = ("http", "https", "s3")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
# Beside what leads elsewhere: halves of surrogate pairs, which no file system and no URL can write down.
_UNSAFE_IN_NAME = re.compile(r"[/\\:\x00-\x1f\x7f\ud800-\udfff]")
# File systems take 255 bytes; a suffix of ours may be added.
_LONGEST_NAME = 240


def scheme_of(place: str) -> str:
    """``http``, ``https``, ``s3``, or ``file`` for a plain path.

    Raises:
        UserError: any other scheme. webdataset, for one, would run what follows ``pipe:`` as a command.
    """
    found = _SCHEME.match(place)
    if not found:
        return "file"
    scheme = found[1].lower()
    if scheme != "file" and scheme not in REMOTE_SCHEMES:
        raise UserError(
            f"{redact(place)}: {scheme}: is not supported; give a path, or a URL of file, http, https or s3"
        )
    if not place[found.end() :].startswith("//"):
        raise UserError(
            f"{redact(place)}: a URL begins {scheme}://; a path that holds a colon is written ./{scheme}:..."
        )
    return scheme


def is_remote(place: str) -> bool:
    """Whether a place is on a server; UserError when its scheme is not supported."""
    return scheme_of(place) != "file"


def local_path(place: str) -> Path:
    """The path of a plain path or ``file://`` URL; UserError when the URL names another host."""
    if not _SCHEME.match(place):
        return Path(place)
    parts = urlsplit(place)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{redact(place)}: a file URL names no host; write file:///folder/manifest.json")
    return Path(unquote(parts.path))


def split_url(url: str) -> tuple[str, str]:
    """A remote file's folder, with the URL's query string, and its name.

    Raises:
        UserError: the URL has no host or bucket, or ends without the name of a file.
    """
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    if not parts.netloc or not name:
        raise UserError(
            f"{redact(url)}: the URL of a manifest names server and file, as in s3://bucket/folder/manifest.json"
        )
    return urlunsplit((parts.scheme.lower(), parts.netloc, folder, parts.query, "")), unquote(name)


def join_url(folder: str, name: str) -> str:
    """The URL of a file in a folder; the folder's query string (often an access token) goes with every file."""
    parts = urlsplit(folder)
    path = f"{parts.path}/{quote(require_plain_name(name), safe='')}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def require_plain_name(name: str) -> str:
    """The name itself; UserError unless it is a plain file name, which leads out of no folder and is no command."""
    if not name or name in (".", "..") or _UNSAFE_IN_NAME.search(name) or len(name.encode("utf-8")) > _LONGEST_NAME:
        raise UserError(f"{shorten(name)} is no plain file name")
    return name


def shorten(text: str) -> str:
    """A stranger's text for a message: quoted, without control characters, not long."""
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
