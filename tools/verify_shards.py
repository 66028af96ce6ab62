"""Compare every byte of a data set with its manifest."""

import io
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pretrain.data.files import sha256_of_file
from pretrain.data.manifest import Manifest, Shard, Split
from pretrain.data.shard_index import Member, index_path, load_index
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError


def find_faults(manifest: Manifest) -> Iterator[str]:
    """One line per fault: tokenizer, sizes, sha256 and crc32 of the shards, shapes, and the counts in the manifest."""
    yield from _tokenizer_faults(manifest)
    for name, split in manifest.splits.items():
        yield from _split_faults(manifest, name, split)


def _tokenizer_faults(manifest: Manifest) -> Iterator[str]:
    name = manifest.tokenizer_file.name
    if sha256_of_file(manifest.tokenizer_file) != manifest.tokenizer_sha256:
        yield f"{name}: its sha256 is not the manifest's"
        return
    tokenizer = Tokenizer(manifest.tokenizer_file)
    for key in ("vocab_size", "eod_id"):
        if getattr(tokenizer, key) != getattr(manifest, key):
            yield f"{name}: {key} {getattr(tokenizer, key)}, the manifest says {getattr(manifest, key)}"


def _split_faults(manifest: Manifest, name: str, split: Split) -> Iterator[str]:
    counts = _TokenCounts(manifest.vocab_size)
    sound = True
    for shard in split.shards:
        for fault in _shard_faults(manifest, shard, counts):
            sound = False
            yield f"{shard.file}: {fault}"
    # Counts of a damaged split would only repeat that it is damaged.
    if sound and split.tokens != counts.values.sum():
        yield f"split {name}: {counts.values.sum()} tokens, the manifest says {split.tokens}"
    if sound and name == "train" and not np.array_equal(counts.values, manifest.token_counts):
        yield f"split {name}: token_counts in the manifest are not the shards'"


class _TokenCounts:
    """Token frequencies of a split, int64 ``[vocab_size]``; a token that two samples share counts once."""

    def __init__(self, vocab_size: int) -> None:
        self.values = np.zeros(vocab_size, dtype=np.int64)
        self._empty = True

    def add(self, block: npt.NDArray[np.unsignedinteger]) -> None:
        """Count samples, one a row: a sample's first token is the last of the one before, but for the very first."""
        self.values += np.bincount(block[:, 1:].ravel(), minlength=len(self.values))
        if self._empty:
            self.values[block[0, 0]] += 1
            self._empty = False


def _shard_faults(manifest: Manifest, shard: Shard, counts: _TokenCounts) -> Iterator[str]:
    """The faults of one shard; the tokens of its sound members are counted."""
    tar = manifest.directory / shard.file
    if not tar.is_file():
        yield "missing"
        return
    size = tar.stat().st_size
    if size != shard.bytes:
        yield f"{size} bytes, the manifest says {shard.bytes}"
        return
    try:
        index = load_index(index_path(tar), shard.index_sha256)
    except UserError as error:
        yield str(error)
        return
    samples = sum(member.samples for member in index.members)
    if samples != shard.samples:
        yield f"{samples} samples, the manifest says {shard.samples}"
        return
    located = False
    with tar.open("rb") as file:
        for member in index.members:
            file.seek(member.offset)
            block = _parse_member(file.read(member.size), member, manifest)
            if isinstance(block, str):
                located = True
                yield f"member {member.name}: {block}"
            else:
                counts.add(block)
    if not located and sha256_of_file(tar) != shard.sha256:
        yield "its sha256 is not the manifest's, though the samples are sound (a tar header, padding or the manifest)"


def _parse_member(content: bytes, member: Member, manifest: Manifest) -> npt.NDArray[np.unsignedinteger] | str:
    """The samples of a member, or what is wrong with it."""
    crc32 = zlib.crc32(content)
    if crc32 != member.crc32:
        return f"crc32 {crc32:08x}, its index says {member.crc32:08x}"
    try:
        block: npt.NDArray[np.unsignedinteger] = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        return f"no .npy file: {error}"
    expected = (member.samples, manifest.sequence_length + 1)
    if block.shape != expected or block.dtype != np.dtype(manifest.dtype):
        return f"holds {block.dtype.str} {block.shape}, the manifest says {manifest.dtype} {expected}"
    if int(block.max()) >= manifest.vocab_size:
        return f"token {block.max()} is outside the vocabulary of {manifest.vocab_size}"
    return block
