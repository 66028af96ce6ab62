"""Looking into shards: where their members lie, and what samples they hold."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import Manifest
from pretrain.data.shard_index import index_path, load_index
from pretrain.errors import UserError

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class ArrayMember:
    """One ``.npy`` file in a tar.

    Attributes:
        name: in the tar.
        offset: byte in the tar at which its first sample begins.
        rows: samples in it.
        length: tokens of a sample.
        dtype: numpy type of a token.
    """

    name: str
    offset: int
    rows: int
    length: int
    dtype: str


def array_members(path: Path, extension: str = ".npy") -> Iterator[ArrayMember]:
    """The members of a tar whose names end so, each an array ``[samples, length]`` or one sample ``[length]``.

    Raises:
        UserError: the tar is damaged, or such a member holds something else; names both.
    """
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (entry := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would grow with every member
                if entry.isfile() and entry.name.endswith(extension):
                    yield _array_member(path, file, entry)
            file.seek(tar.offset)
            # tarfile takes a damaged header for the end; a real end is a block of zeros.
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise UserError(f"{path} is damaged or cut off at byte {tar.offset}")
    except tarfile.TarError as error:
        raise UserError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _array_member(path: Path, file: BinaryIO, entry: tarfile.TarInfo) -> ArrayMember:
    file.seek(entry.offset_data)
    try:
        shape, fortran, dtype = _HEADER_READERS[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: member {entry.name} is no .npy file of version 1 or 2") from error
    offset = file.tell()
    if len(shape) not in (1, 2) or (fortran and len(shape) == 2) or 0 in shape:
        raise UserError(f"{path}: member {entry.name} has shape {shape}, not [samples, tokens] or [tokens] row by row")
    rows, length = (1, *shape) if len(shape) == 1 else shape
    if offset + rows * length * dtype.itemsize != entry.offset_data + entry.size:
        raise UserError(f"{path}: member {entry.name} has {entry.size} bytes, which its shape {shape} contradicts")
    return ArrayMember(entry.name, offset, rows, length, dtype.str)


def blocks_of(manifest: Manifest, split: str) -> Iterator[npt.NDArray[Any]]:
    """The samples of a split as they are stored, ``[samples, sequence_length + 1]``, a member at a time."""
    for shard in manifest.split(split).shards:
        tar = manifest.directory / shard.file
        index = load_index(index_path(tar), shard.index_sha256)
        with tar.open("rb") as file:
            for offset, rows in zip(index.offsets.tolist(), index.rows.tolist(), strict=True):
                file.seek(offset)
                content = file.read(rows * index.header.row_bytes)
                yield np.frombuffer(content, dtype=manifest.dtype).reshape(rows, manifest.sequence_length + 1)


def count_labels(manifest: Manifest, split: str) -> npt.NDArray[np.int64]:
    """int64 ``[vocab_size]``: how often each token is a label of a split's samples."""
    counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    for block in blocks_of(manifest, split):
        counts += np.bincount(block[:, 1:].ravel(), minlength=len(counts))
    return counts
