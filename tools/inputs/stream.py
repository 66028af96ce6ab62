"""All records of all inputs, in order, in this process."""

from collections.abc import Iterator, Sequence

from tools.documents import Document
from tools.inputs.account import Account
from tools.inputs.files import InputFile
from tools.inputs.progress import Progress
from tools.inputs.readers import read_raw
from tools.inputs.records import UNREADABLE, Fault, Raw, Reading, parse

_TELL_EVERY = 64


def raw_records(file: InputFile, reading: Reading) -> Iterator[tuple[Raw, int]]:
    """The records of one file, each with the bytes of the file that were read up to it."""
    try:
        opened = file.path.open("rb")
    except OSError as error:
        yield Raw(str(file.path), fault=f"{UNREADABLE} ({error.strerror})"), 0
        return
    with opened:
        for number, raw in enumerate(read_raw(file.path, opened, reading)):
            # Asking for the place costs as much as reading a short line.
            if number % _TELL_EVERY == 0:
                place = opened.tell()
            yield raw, place


def read_documents(
    files: Sequence[InputFile], reading: Reading, account: Account, progress: Progress | None = None
) -> Iterator[Document]:
    """The documents of all files; what gives none is dropped in ``account``."""
    before = 0
    for file in files:
        for raw, place in raw_records(file, reading):
            document = parse(raw, reading)
            if isinstance(document, Fault):
                account.drop(document)
                continue
            account.keep(len(document.text.encode("utf-8")))
            if progress is not None:
                progress.tell(account.documents, account.text_bytes, before + place)
            yield document
        before += file.size
