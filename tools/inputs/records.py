"""A record of an input, raw and parsed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tools.documents import Document

# Longer documents are dropped and counted unless the user says otherwise, which bounds the memory of a worker.
MAX_DOCUMENT_BYTES = 256_000_000


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the inputs are to be read.

    Attributes:
        text_key: field of a JSON record, and column of a parquet file, that holds the text.
        lines: whether each line of a text file is a document; else the file is one.
        max_document_bytes: of UTF-8 text; a longer document is dropped and counted.
    """

    text_key: str = "text"
    lines: bool = False
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    @property
    def max_json_bytes(self) -> int:
        """Longest JSON record that is read: escapes can make text up to 6 times longer, and other fields need room."""
        return 6 * self.max_document_bytes + (1 << 16)


class Raw(NamedTuple):
    """One record as it lies in its file, cheap to make and to hand to another process.

    Attributes:
        where: file and line, member or row.
        content: its bytes.
        form: ``text`` or ``json``.
        fault: what the reader found wrong with it already; empty when nothing.
    """

    where: str
    content: bytes = b""
    form: str = "text"
    fault: str = ""


class Fault(NamedTuple):
    """A record that gives no document: where it is, and the kind of its fault, by which it is counted."""

    where: str
    kind: str


NOT_UTF8 = "not UTF-8"
EMPTY = "empty"
BROKEN_JSON = "broken JSON"
NOT_A_STRING = "text is no string"
HALF_SURROGATE = "not Unicode (half of a surrogate pair)"
TOO_LONG = "too long"
UNREADABLE = "unreadable"


def no_field(key: str) -> str:
    """The kind of fault of a record without the field that should hold the text."""
    return f"no field {key!r}"


def parse(raw: Raw, reading: Reading) -> Document | Fault:
    """The document that a raw record is, or why it is none."""
    if raw.fault:
        return Fault(raw.where, raw.fault)
    try:
        text = _PARSERS[raw.form](raw.content, reading)
    except _BadRecordError as error:
        return Fault(raw.where, error.kind)
    return Document(text, raw.where)


class _BadRecordError(Exception):
    """A record that holds no usable text."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise _BadRecordError(NOT_UTF8) from None


def _parse_text(content: bytes, reading: Reading) -> str:
    if len(content) > reading.max_document_bytes:
        raise _BadRecordError(TOO_LONG)
    text = _decode(content)
    if not text.strip():
        raise _BadRecordError(EMPTY)
    return text


def _parse_json(content: bytes, reading: Reading) -> str:
    if not content.strip():
        raise _BadRecordError(EMPTY)
    # Some programs begin a file with a byte order mark, which json refuses.
    line = _decode(content).removeprefix("\ufeff")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _BadRecordError(BROKEN_JSON) from None
    if not isinstance(record, dict) or reading.text_key not in record:
        raise _BadRecordError(no_field(reading.text_key))
    text = record[reading.text_key]
    if not isinstance(text, str):
        raise _BadRecordError(NOT_A_STRING)
    if not text.strip():
        raise _BadRecordError(EMPTY)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise _BadRecordError(HALF_SURROGATE) from None
    if size > reading.max_document_bytes:
        raise _BadRecordError(TOO_LONG)
    return text


_PARSERS: dict[str, Callable[[bytes, Reading], str]] = {"text": _parse_text, "json": _parse_json}
