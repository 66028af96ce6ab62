"""Looking into shards: where their members lie, and what samples they hold."""

import tarfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from pretrain.data.manifest import Manifest
from pretrain.data.shard_index import check_header, index_path, load_index
from pretrain.errors import UserError
from tools.tars import files_in, open_tar

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
        with path.open("rb") as file, open_tar(file) as tar:
            for entry in files_in(tar):
                if entry.name.endswith(extension):
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
    if entry.issparse():
        raise UserError(f"{path}: member {entry.name} is stored without its zeros (tar --sparse): pack it anew")
    file.seek(entry.offset_data)
    try:
        shape, fortran, dtype = _HEADER_READERS[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError, tokenize.TokenError, RecursionError, MemoryError) as error:
        # numpy parses the header as Python's literals, so that damage can be anything that a parser dislikes.
        raise UserError(f"{path}: member {entry.name} is no .npy file of version 1 or 2") from error
    offset = file.tell()
    if len(shape) not in (1, 2) or (fortran and len(shape) == 2) or min(shape) < 1:
        raise UserError(f"{path}: member {entry.name} has shape {shape}, not [samples, tokens] or [tokens] row by row")
    rows, length = (1, *shape) if len(shape) == 1 else shape
    if offset + rows * length * dtype.itemsize != entry.offset_data + entry.size:
        raise UserError(f"{path}: member {entry.name} has {entry.size} bytes, which its shape {shape} contradicts")
    return ArrayMember(entry.name, offset, rows, length, dtype.str)


def blocks_of(manifest: Manifest, split: str) -> Iterator[npt.NDArray[Any]]:
    """The samples of a split as they are stored, ``[samples, sequence_length + 1]``, a member at a time.

    Raises:
        UserError: a shard is missing or not what the manifest describes.
    """
    for shard in manifest.split(split).shards:
        tar = manifest.directory / shard.file
        index = load_index(index_path(tar), shard.index_sha256)
        fault = check_header(index.header, manifest, shard)
        if fault:
            raise UserError(f"{tar}: {fault}; build or copy both again")
        first = 0
        try:
            with tar.open("rb") as file:
                for offset, rows in zip(index.offsets.tolist(), index.rows.tolist(), strict=True):
                    file.seek(offset)
                    content = file.read(rows * index.header.row_bytes)
                    if fault := block_fault(content, index.crc32[first : first + rows], manifest):
                        raise UserError(f"{tar} is damaged: {fault}; python -m tools.shards verify finds all damage")
                    yield block_in(content, manifest)
                    first += rows
        except OSError as error:
            raise UserError(f"{tar} cannot be read: {error.strerror}") from error


def block_in(content: bytes, manifest: Manifest) -> npt.NDArray[Any]:
    """The samples in the bytes of a member, ``[samples, sequence_length + 1]``."""
    return np.frombuffer(content, dtype=manifest.dtype).reshape(-1, manifest.sequence_length + 1)


def block_fault(content: bytes, crc32: npt.NDArray[np.uint32], manifest: Manifest) -> str | None:
    """What is wrong with the samples of a member, if anything."""
    size = len(crc32) * (manifest.sequence_length + 1) * np.dtype(manifest.dtype).itemsize
    if len(content) != size:
        return f"{len(content)} bytes instead of {size}"
    block = block_in(content, manifest)
    bad = [row for row, expected in enumerate(crc32.tolist()) if zlib_ng.crc32(block[row]) != expected]
    if bad:
        return f"{len(bad)} of {len(block)} samples, the first its sample {bad[0]}, have another crc32 than the index"
    if int(block.max()) >= manifest.vocab_size:
        return f"token {block.max()} is outside the vocabulary of {manifest.vocab_size}"
    return None


def count_labels(manifest: Manifest, split: str) -> npt.NDArray[np.int64]:
    """int64 ``[vocab_size]``: how often each token is a label of a split's samples."""
    counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    for block in blocks_of(manifest, split):
        counts += np.bincount(block[:, 1:].ravel(), minlength=len(counts))
    return counts
