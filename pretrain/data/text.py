"""The text in a record, or the kind of fault for which it holds none."""

import json

# Longer documents are dropped and counted unless the user says otherwise, which bounds the memory of a process.
MAX_DOCUMENT_BYTES = 256_000_000

NOT_UTF8 = "not UTF-8"
EMPTY = "empty"
BROKEN_JSON = "broken JSON"
NOT_A_STRING = "text is no string"
HALF_SURROGATE = "not Unicode (half of a surrogate pair)"
TOO_LONG = "too long"


def no_field(key: str) -> str:
    """The kind of fault of a record without the field that should hold the text."""
    return f"no field {key!r}"


class NoTextError(Exception):
    """A record that holds no usable text.

    Attributes:
        kind: of its fault, by which it is counted.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def max_json_bytes(max_document_bytes: int) -> int:
    """Longest JSON record that is read: escapes can make text up to 6 times longer, and other fields need room."""
    return 6 * max_document_bytes + (1 << 16)


def text_of_plain(content: bytes, max_document_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The text of a record that is one.

    Raises:
        NoTextError: it is longer than ``max_document_bytes``, not UTF-8 or empty.
    """
    if len(content) > max_document_bytes:
        raise NoTextError(TOO_LONG)
    text = _decode(content)
    if not text.strip("\0").strip():  # lost blocks of a disk read as zeros
        raise NoTextError(EMPTY)
    return text


def text_of_json(content: bytes, field: str, max_document_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The text in a field of a JSON object.

    Raises:
        NoTextError: no such object, no such field, or no text of at most ``max_document_bytes`` of UTF-8 in it.
    """
    if not content.strip():
        raise NoTextError(EMPTY)
    # Some programs begin a file with a byte order mark, which json refuses.
    line = _decode(content).removeprefix("\ufeff")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise NoTextError(BROKEN_JSON) from None
    if not isinstance(record, dict) or field not in record:
        raise NoTextError(no_field(field))
    text = record[field]
    if not isinstance(text, str):
        raise NoTextError(NOT_A_STRING)
    if not text.strip():
        raise NoTextError(EMPTY)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise NoTextError(HALF_SURROGATE) from None
    if size > max_document_bytes:
        raise NoTextError(TOO_LONG)
    return text


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise NoTextError(NOT_UTF8) from None
