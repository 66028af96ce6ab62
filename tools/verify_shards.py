"""Compare every byte of a data set with its manifest."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.files import sha256_of_file
from pretrain.data.manifest import Manifest, Shard, Split
from pretrain.data.shard_index import ShardIndex, check_header, index_path, load_index
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tools.sharding.scan import array_members, block_fault, block_in


def find_faults(manifest: Manifest) -> Iterator[str]:
    """One line per fault: tokenizer, sizes, sha256 and crc32 of the shards, shapes, and the counts in the manifest."""
    yield from _tokenizer_faults(manifest)
    for name, split in manifest.splits.items():
        yield from _split_faults(manifest, name, split)


def _tokenizer_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.tokenizer_file is None:
        return
    name = manifest.tokenizer_file.name
    if sha256_of_file(manifest.tokenizer_file) != manifest.tokenizer_sha256:
        yield f"{name}: its sha256 is not the manifest's"
        return
    try:
        tokenizer = Tokenizer(manifest.tokenizer_file, manifest.eod_id)
    except UserError as error:
        yield f"{name}: {error}"
        return
    if tokenizer.vocab_size != manifest.vocab_size:
        yield f"{name}: vocab_size {tokenizer.vocab_size}, the manifest says {manifest.vocab_size}"


def _split_faults(manifest: Manifest, name: str, split: Split) -> Iterator[str]:
    counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    sound = True
    for shard in split.shards:
        for fault in _shard_faults(manifest, shard, counts):
            sound = False
            yield f"{shard.file}: {fault}"
    # Counts of a damaged split would only repeat that it is damaged.
    if sound and split.tokens != counts.sum():
        yield f"split {name}: {counts.sum()} tokens, the manifest says {split.tokens}"
    if sound and name == "train" and not np.array_equal(counts, manifest.token_counts):
        yield f"split {name}: token_counts in the manifest are not the shards'"


def _shard_faults(manifest: Manifest, shard: Shard, counts: npt.NDArray[np.int64]) -> Iterator[str]:
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
    fault = check_header(index.header, manifest, shard)
    if fault:
        yield fault
        return
    located = False
    with tar.open("rb") as file:
        first = 0
        for member, (offset, rows) in enumerate(zip(index.offsets.tolist(), index.rows.tolist(), strict=True)):
            file.seek(offset)
            content = file.read(rows * index.header.row_bytes)
            fault = block_fault(content, index.crc32[first : first + rows], manifest)
            if fault:
                located = True
                yield f"member {member}: {fault}"
            else:
                counts += np.bincount(block_in(content, manifest)[:, 1:].ravel(), minlength=len(counts))
            first += rows
    if not located and sha256_of_file(tar) == shard.sha256:
        yield from _member_faults(tar, index)
    elif not located:
        yield "its sha256 is not the manifest's, though the samples are sound (a tar header, padding or the manifest)"


def _member_faults(tar: Path, index: ShardIndex) -> Iterator[str]:
    """How the members of a tar are not those that its index tells of."""
    expected = list(zip(index.offsets.tolist(), index.rows.tolist(), strict=True))
    try:
        found = [(member.offset, member.rows) for member in array_members(tar)]
    except UserError as error:
        yield str(error)
        return
    # Foreign tars may have arrays beside the tokens.
    if not set(expected) <= set(found):
        wrong = next(number for number, place in enumerate(expected) if place not in set(found))
        yield f"member {wrong} of its index is none of the tar's"
