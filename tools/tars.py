"""Going through tars that anybody may have written."""

import tarfile
from collections.abc import Iterator
from typing import BinaryIO

# What tarfile lets through of headers that hold something else than they should.
_DAMAGE = (ValueError, OverflowError, RecursionError)


def open_tar(file: BinaryIO) -> tarfile.TarFile:
    """An uncompressed tar to read; tarfile.TarError when its first header is damaged."""
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except _DAMAGE as error:
        raise tarfile.ReadError("its first header is none") from error


def files_in(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The plain files of an open tar, in order.

    Raises:
        tarfile.TarError: it is damaged, or says of a member what would lead round in a circle.
    """
    while (member := _next(tar)) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile's list would grow with the length of the tar
        if member.size < 0 or tar.offset <= member.offset:
            raise tarfile.ReadError(f"member {member.name} has {member.size} bytes")
        if member.isfile():
            yield member


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return tar.next()
    except _DAMAGE as error:
        raise tarfile.ReadError(f"a header at byte {tar.offset} is none") from error
