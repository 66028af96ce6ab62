"""All records of all inputs, in order, in this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.documents import Document
from tools.inputs.account import Account
from tools.inputs.files import InputFile
from tools.inputs.formats import Format
from tools.inputs.progress import Progress
from tools.inputs.readers import read_raw
from tools.inputs.records import UNREADABLE, Fault, Raw, Reading, parse

_TELL_EVERY = 64


def raw_records(path: Path, reading: Reading, form: Format | None = None) -> Iterator[tuple[Raw, int]]:
    """The records of one file, each with the bytes of the file that were read up to it."""
    try:
        opened = path.open("rb")
    except OSError as error:
        yield Raw(str(path), fault=f"{UNREADABLE} ({error.strerror})"), 0
        return
    place = 0
    with opened:
        for number, raw in enumerate(read_raw(path, opened, reading, form)):
            # Asking for the place costs as much as reading a short line.
            if number % _TELL_EVERY == 0:
                place = opened.tell()
            yield raw, place


def documents_in(
    path: Path,
    reading: Reading,
    account: Account,
    form: Format | None = None,
    told: Callable[[int], None] | None = None,
) -> Iterator[Document]:
    """The documents of one file; what gives none is dropped in ``account``.

    Args:
        path: of the file.
        reading: how to read it.
        account: of what is read.
        form: type of the file; None goes by its name.
        told: is called with the bytes of the file that were read so far.
    """
    for raw, place in raw_records(path, reading, form):
        document = parse(raw, reading)
        if isinstance(document, Fault):
            account.drop(document)
            continue
        account.keep(len(document.text.encode("utf-8")))
        if told is not None:
            told(place)
        yield document


def read_documents(
    files: Sequence[InputFile], reading: Reading, account: Account, progress: Progress | None = None
) -> Iterator[Document]:
    """The documents of all files; what gives none is dropped in ``account``."""
    before = 0

    def tell(place: int) -> None:
        if progress is not None:
            progress.tell(account.documents, account.text_bytes, before + place)

    for file in files:
        yield from documents_in(file.path, reading, account, told=tell)
        before += file.size
