"""Raw records of each type of input file; every reader tells of damage by a record and goes on where it can."""

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from pretrain.data.text import EMPTY, NOT_A_STRING, TOO_LONG, no_field
from tools.inputs.compression import DAMAGE, OPENERS
from tools.inputs.formats import FORMATS, Format, suffix_of
from tools.inputs.records import UNREADABLE, Raw, Reading
from tools.tars import files_in, open_tar

_PARQUET_ROWS = 256


def read_raw(path: Path, file: BinaryIO, reading: Reading, form: Format | None = None) -> Iterator[Raw]:
    """The records of one file, in order.

    Args:
        path: of the file, for messages.
        file: the same, open at its beginning; how far it was read is the reader's progress.
        reading: how to read it.
        form: type of the file; None goes by its name.
    """
    suffix = suffix_of(path)
    if form is None and suffix is None:
        raise ValueError(f"{path} is of no known type")
    content, compression = form or FORMATS[str(suffix)]
    try:
        empty = not file.read(1)
        file.seek(0)
    except OSError as error:
        yield Raw(str(path), fault=f"{UNREADABLE} ({error.strerror})")
        return
    if empty:
        yield Raw(str(path), fault=EMPTY)
        return
    yield from _READERS[content](path, OPENERS[compression](file), reading)


def _read_json_lines(path: Path, stream: BinaryIO, reading: Reading) -> Iterator[Raw]:
    yield from _read_lines(path, stream, "json", reading.max_json_bytes)


def _read_text(path: Path, stream: BinaryIO, reading: Reading) -> Iterator[Raw]:
    if reading.lines:
        yield from _read_lines(path, stream, "text", reading.max_document_bytes)
        return
    try:
        content = stream.read(reading.max_document_bytes + 1)
    except DAMAGE:
        yield Raw(str(path), fault=_damaged(path))
    except OSError as error:
        yield Raw(str(path), fault=f"{UNREADABLE} ({error.strerror})")
    else:
        yield Raw(str(path), content)


def _read_lines(path: Path, stream: BinaryIO, form: str, limit: int) -> Iterator[Raw]:
    """One record a line, without its end; of a line above ``limit`` bytes no more than that is held in memory."""
    number = 0
    while True:
        number += 1
        where = f"{path}:{number}"
        try:
            line = stream.readline(limit + 1)
            too_long = len(line) > limit and not line.endswith(b"\n")
            part = line if too_long else b"\n"
            while part and not part.endswith(b"\n"):
                part = stream.readline(1 << 20)
        except DAMAGE:
            yield Raw(where, fault=_damaged(path))
            return
        except OSError as error:
            yield Raw(where, fault=f"{UNREADABLE} ({error.strerror})")
            return
        if not line:
            return
        yield Raw(where, fault=TOO_LONG) if too_long else Raw(where, line.removesuffix(b"\n"), form)


def _damaged(path: Path) -> str:
    suffix = suffix_of(path)
    return f"damaged or cut off ({FORMATS[suffix].compression if suffix else path.suffix})"


DAMAGED_TAR = "damaged or cut off (tar)"
DAMAGED_PARQUET = "damaged or cut off (parquet)"
NO_TEXT_MEMBER = "no .txt or .json member"


def _read_tar(path: Path, stream: BinaryIO, reading: Reading) -> Iterator[Raw]:
    """One record for each WebDataset sample, the neighbouring members that share a name up to its first dot.

    Its text is the member ``.txt`` or else the field of the member ``.json``; members of other types are passed over.
    """
    key: str | None = None
    best: Raw | None = None
    try:
        with open_tar(stream) as tar:
            for member in files_in(tar):
                folder, _, name = member.name.rpartition("/")
                base, _, extension = name.partition(".")
                if key is not None and key != f"{folder}/{base}":
                    yield best or Raw(f"{path}:{key.removeprefix('/')}", fault=NO_TEXT_MEMBER)
                    best = None
                key = f"{folder}/{base}"
                if extension.lower() == "txt" or (extension.lower() == "json" and best is None):
                    best = _read_member(path, tar, member, reading, extension.lower())
            if key is not None:
                yield best or Raw(f"{path}:{key.removeprefix('/')}", fault=NO_TEXT_MEMBER)
                key = None
            place = tar.offset
        stream.seek(place)
        # tarfile takes a damaged header for the end; a real end is a block of zeros.
        if stream.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
            yield Raw(f"{path}: byte {place}", fault=DAMAGED_TAR)
    except tarfile.TarError:
        # Also the sample in whose midst it happened.
        yield Raw(f"{path}:{key.removeprefix('/')}" if key else str(path), fault=DAMAGED_TAR)
    except OSError as error:
        yield Raw(str(path), fault=f"{UNREADABLE} ({error.strerror})")


def _read_member(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, reading: Reading, extension: str) -> Raw:
    where = f"{path}:{member.name}"
    form = "text" if extension == "txt" else "json"
    if member.size > (reading.max_document_bytes if form == "text" else reading.max_json_bytes):
        return Raw(where, fault=TOO_LONG)
    file = tar.extractfile(member)
    if file is None:
        raise ValueError(f"{where} is no file")
    return Raw(where, file.read(), form)


def _read_parquet(path: Path, stream: BinaryIO, reading: Reading) -> Iterator[Raw]:
    """One record a row, from the column named by ``text_key``."""
    # Here, not above: a third of a second that most inputs need not wait for.
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(stream)
        fault = _column_fault(table.schema_arrow, reading.text_key)
        if fault:
            for row in range(table.metadata.num_rows):
                yield Raw(f"{path}:row {row + 1}", fault=fault)
            return
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[reading.text_key]):
            # As bytes: pyarrow does not promise that a string is UTF-8.
            for value in batch.column(0).cast(pyarrow.large_binary()):
                row += 1
                content = value.as_py()
                where = f"{path}:row {row}"
                yield Raw(where, fault=NOT_A_STRING) if content is None else Raw(where, cast("bytes", content))
    except (pyarrow.ArrowException, OSError):
        yield Raw(f"{path}:row {row + 1}", fault=DAMAGED_PARQUET)


def _column_fault(schema: "pyarrow.Schema", key: str) -> str:  # type: ignore[name-defined]  # noqa: F821
    import pyarrow.types as types

    if key not in schema.names:
        return no_field(key)
    kind = schema.field(key).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    textual = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return "" if any(belongs(kind) for belongs in textual) else NOT_A_STRING


_READERS: dict[str, Callable[[Path, BinaryIO, Reading], Iterator[Raw]]] = {
    "json": _read_json_lines,
    "text": _read_text,
    "parquet": _read_parquet,
    "tar": _read_tar,
}
