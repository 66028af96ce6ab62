"""The side index of a shard: where in the tar each member's samples lie, and the crc32 of every sample.

Binary, so that it can be mapped into memory: 8 bytes magic, the length of a JSON header as ``<u8``, the header, and
then, each at a multiple of 8 bytes, three arrays: ``<u8`` offsets and ``<u8`` rows, one a member, and ``<u4`` crc32,
one a sample.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from pretrain.data.files import sha256_of_file, write_atomically
from pretrain.data.folder import Entry
from pretrain.data.manifest import (
    FORMAT_VERSION,
    Count,
    Dtype,
    Manifest,
    PositiveCount,
    Shard,
    describe_first_error,
)
from pretrain.errors import UserError

MAGIC = b"SHARDIDX"
INDEX_SUFFIX = ".idx"

_PREFIX = len(MAGIC) + 8
# A header holds a few names and numbers; a larger length is that of some other file.
_LARGEST_HEADER = 1 << 16


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """The JSON header of a side index, key for key.

    Attributes:
        version: of the format.
        tar: name of the tar.
        tar_bytes: its size.
        tar_sha256: hex.
        tokenizer_sha256: hex.
        eod_id: token that ends each document.
        dtype: numpy type of the stored tokens.
        sample_length: tokens in a stored sample.
        samples: rows of all members.
        members: ``.npy`` files in the tar.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    version: int
    tar: str
    tar_bytes: PositiveCount
    tar_sha256: str
    tokenizer_sha256: str
    eod_id: Count
    dtype: Dtype
    sample_length: PositiveCount
    samples: PositiveCount
    members: PositiveCount

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored sample."""
        return self.sample_length * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """A side index; its arrays are read-only and, where it was loaded, lie in the file.

    Attributes:
        header: what the shard is.
        offsets: uint64 ``[members]``, byte in the tar where a member's first sample begins; the others follow it.
        rows: uint64 ``[members]``, samples of a member, in the order of the tar.
        crc32: uint32 ``[samples]``, of the stored bytes of each sample.
    """

    header: IndexHeader
    offsets: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    crc32: npt.NDArray[np.uint32]


def index_path(tar: Path) -> Path:
    """The side index that belongs to a tar."""
    return tar.with_suffix(INDEX_SUFFIX)


def entries(shard: Shard) -> tuple[Entry, Entry]:
    """A shard's tar and its side index, as files of the data set's folder."""
    # As many members as samples at worst.
    largest_index = 2 * _LARGEST_HEADER + shard.samples * (8 + 8 + 4)
    return (
        Entry(shard.file, shard.sha256, shard.bytes, shard.bytes),
        Entry(index_path(Path(shard.file)).name, shard.index_sha256, None, largest_index),
    )


def write_index(
    path: Path,
    header: IndexHeader,
    offsets: npt.ArrayLike,
    rows: npt.ArrayLike,
    crc32: npt.ArrayLike,
) -> str:
    """Write a side index atomically; the arguments are the fields of :class:`ShardIndex`.

    Returns:
        The sha256 of the file, hex.

    Raises:
        ValueError: the arrays do not fit the header.
    """
    arrays = {
        "offsets": np.asarray(offsets, dtype="<u8"),
        "rows": np.asarray(rows, dtype="<u8"),
        "crc32": np.asarray(crc32, dtype="<u4"),
    }
    expected = {"offsets": header.members, "rows": header.members, "crc32": header.samples}
    for name, array in arrays.items():
        if array.shape != (expected[name],):
            raise ValueError(f"{name} has shape {array.shape} instead of ({expected[name]},)")
    if int(arrays["rows"].sum()) != header.samples:
        raise ValueError(f"the members have {arrays['rows'].sum()} samples instead of {header.samples}")
    text = json.dumps(asdict(header), sort_keys=True).encode("ascii")
    parts = [MAGIC + len(text).to_bytes(8, "little") + text, *(array.tobytes() for array in arrays.values())]
    write_atomically(path, b"".join(part + bytes(-len(part) % 8) for part in parts))
    return sha256_of_file(path)


def load_index(path: Path, sha256: str | None = None) -> ShardIndex:
    """Map a side index into memory.

    Args:
        path: of the index.
        sha256: what the file must have, hex; None leaves it unchecked.

    Raises:
        UserError: it is absent, another one, damaged, or of another version.
    """
    header, start = _read_header(path)
    if sha256 is not None and sha256_of_file(path) != sha256:
        raise UserError(f"shard index {path} is not the one that the manifest describes: build the shards anew")
    wide, total = 8 * header.members, start + 16 * header.members + 4 * header.samples
    total += -total % 8
    content = np.memmap(path, dtype=np.uint8, mode="r")
    if len(content) != total:
        raise UserError(f"shard index {path} has {len(content)} bytes instead of {total}: build the shards anew")
    crc32 = content[start + 2 * wide :][: 4 * header.samples]
    index = ShardIndex(
        header=header,
        offsets=content[start : start + wide].view("<u8"),
        rows=content[start + wide : start + 2 * wide].view("<u8"),
        crc32=crc32.view("<u4"),
    )
    # Bounded one by one first, so that no sum or product wraps round.
    sound = int(index.rows.max()) * header.row_bytes <= header.tar_bytes >= int(index.offsets.max())
    ends = index.offsets + index.rows * np.uint64(header.row_bytes)
    if not sound or int(index.rows.sum()) != header.samples or int(ends.max()) > header.tar_bytes:
        raise UserError(f"shard index {path} contradicts itself: build the shards anew")
    return index


def load_header(path: Path) -> IndexHeader:
    """Read the header alone; UserError when the index is absent, damaged, or of another version."""
    return _read_header(path)[0]


def check_header(header: IndexHeader, manifest: Manifest, shard: Shard) -> str | None:
    """How a side index contradicts the manifest that names its shard, if it does."""
    facts = {
        "tar": (header.tar, shard.file),
        "tar_bytes": (header.tar_bytes, shard.bytes),
        "tar_sha256": (header.tar_sha256, shard.sha256),
        "tokenizer_sha256": (header.tokenizer_sha256, manifest.tokenizer_sha256),
        "eod_id": (header.eod_id, manifest.eod_id),
        "dtype": (header.dtype, manifest.dtype),
        "sample_length": (header.sample_length, manifest.sequence_length + 1),
        "samples": (header.samples, shard.samples),
    }
    for name, (found, expected) in facts.items():
        if found != expected:
            return f"its index says {name} {found}, the manifest {expected}"
    return None


def check_files(manifest: Manifest) -> None:
    """See that every file that a manifest names is there, that shards have their size and an index of their own.

    What is remote is verified when it arrives, byte for byte, and not asked for before.

    Raises:
        UserError: naming the first that is not.
    """
    file = manifest.tokenizer_file
    if file is not None and sha256_of_file(file) != manifest.tokenizer_sha256:
        raise UserError(f"tokenizer {manifest.tokenizer_file} is not the one that the shards were built with")
    if not manifest.folder.is_local:
        return
    for split in manifest.splits.values():
        for shard in split.shards:
            tar = manifest.directory / shard.file
            for part in (tar, index_path(tar)):
                if not part.is_file():
                    raise UserError(f"{part} is missing, though {manifest.directory} lists it")
            if (found := tar.stat().st_size) != shard.bytes:
                raise UserError(f"{tar} has {found} bytes instead of {shard.bytes}; build or copy it again")
            fault = check_header(load_header(index_path(tar)), manifest, shard)
            if fault:
                raise UserError(f"{tar}: {fault}; build or copy both again")


def _read_header(path: Path) -> tuple[IndexHeader, int]:
    """The header, and the byte behind it and its padding."""
    try:
        with path.open("rb") as file:
            prefix = file.read(_PREFIX)
            length = int.from_bytes(prefix[len(MAGIC) :], "little")
            text = file.read(length) if length <= _LARGEST_HEADER else b""
    except FileNotFoundError:
        raise UserError(f"shard index {path} does not exist") from None
    except OSError as error:
        raise UserError(f"shard index {path} cannot be read: {error.strerror}") from error
    if not prefix.startswith(MAGIC) or not 0 < length == len(text):
        raise UserError(f"shard index {path} is none, or damaged at its head: build the shards anew")
    try:
        header = TypeAdapter(IndexHeader).validate_json(text)
    except ValidationError as error:
        raise UserError(f"shard index {path} is damaged at {describe_first_error(error)}") from error
    if header.version != FORMAT_VERSION:
        raise UserError(f"shard index {path} has format version {header.version}, this program reads {FORMAT_VERSION}")
    end = _PREFIX + length
    return header, end + -end % 8
