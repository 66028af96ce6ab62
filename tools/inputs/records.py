"""A record of an input, raw and parsed."""

from dataclasses import dataclass
from typing import NamedTuple

from pretrain.data.text import MAX_DOCUMENT_BYTES, NoTextError, max_json_bytes, text_of_json, text_of_plain
from tools.documents import Document


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
        """Longest JSON record that is read."""
        return max_json_bytes(self.max_document_bytes)


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


UNREADABLE = "unreadable"


def parse(raw: Raw, reading: Reading) -> Document | Fault:
    """The document that a raw record is, or why it is none."""
    if raw.fault:
        return Fault(raw.where, raw.fault)
    try:
        if raw.form == "json":
            text = text_of_json(raw.content, reading.text_key, reading.max_document_bytes)
        else:
            text = text_of_plain(raw.content, reading.max_document_bytes)
    except NoTextError as error:
        return Fault(raw.where, error.kind)
    return Document(text, raw.where)
