"""The side index of a shard: where in the tar each member lies, so that a sample is one read at a known place."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from pretrain.data.files import sha256_of_file
from pretrain.data.manifest import FORMAT_VERSION, Dtype, Manifest, describe_first_error, read_json
from pretrain.errors import UserError

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One ``.npy`` file inside the tar: ``[samples, sample_length]`` tokens.

    Attributes:
        name: file name inside the tar.
        offset: byte in the tar where the ``.npy`` file begins.
        size: bytes of the ``.npy`` file, header included.
        samples: rows.
        crc32: of the whole ``.npy`` file.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    name: str
    offset: NonNegativeInt
    size: PositiveInt
    samples: PositiveInt
    crc32: NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The content of ``<shard>.idx.json``, key for key.

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
        members: in the order of the tar.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    version: int
    tar: str
    tar_bytes: PositiveInt
    tar_sha256: str
    tokenizer_sha256: str
    eod_id: NonNegativeInt
    dtype: Dtype
    sample_length: PositiveInt
    samples: PositiveInt
    members: tuple[Member, ...]


def index_path(tar: Path) -> Path:
    """The side index that belongs to a tar."""
    return tar.with_suffix(".idx.json")


def load_index(path: Path, sha256: str) -> ShardIndex:
    """Read a side index that must have this sha256; UserError when it is absent, another one, or of another version."""
    content = read_json(path, "shard index")
    if sha256_of_file(path) != sha256:
        raise UserError(f"shard index {path} is not the one that the manifest describes: build the shards anew")
    try:
        index = TypeAdapter(ShardIndex).validate_python(content)
    except ValidationError as error:
        raise UserError(f"shard index {path} is damaged at {describe_first_error(error)}") from error
    if index.version != FORMAT_VERSION:
        raise UserError(f"shard index {path} has format version {index.version}, this program reads {FORMAT_VERSION}")
    return index


def check_files(manifest: Manifest) -> None:
    """See that every file that a manifest names is there, shards in their size and the tokenizer in its content.

    Raises:
        UserError: naming the first that is not.
    """
    if sha256_of_file(manifest.tokenizer_file) != manifest.tokenizer_sha256:
        raise UserError(f"tokenizer {manifest.tokenizer_file} is not the one that the shards were built with")
    for split in manifest.splits.values():
        for shard in split.shards:
            tar = manifest.directory / shard.file
            for file in (tar, index_path(tar)):
                if not file.is_file():
                    raise UserError(f"{file} is missing, though {manifest.directory} lists it")
            if (found := tar.stat().st_size) != shard.bytes:
                raise UserError(f"{tar} has {found} bytes instead of {shard.bytes}; build or copy it again")
