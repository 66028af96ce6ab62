"""Several data sets of one tokenizer and length as one, without writing their samples anew."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.files import partial_path, publish, write_atomically
from pretrain.data.manifest import (
    MANIFEST_NAME,
    SPLITS,
    Manifest,
    Shard,
    Statistics,
    canonical_json,
    load_manifest,
    read_json,
)
from pretrain.data.shard_index import check_files, index_path, load_index, write_index
from pretrain.errors import UserError
from tools.documents import make_folder
from tools.sharding.description import PackedData, PackedSplit, print_summary, spare_tokenizer, write_manifest
from tools.sharding.pack import shards_in, sole_builder
from tools.sharding.scan import count_labels

_SAME = ("sequence_length", "vocab_size", "eod_id", "dtype", "tokenizer_sha256")


def merge(folders: Sequence[Path | str], out: Path, name: str, copy: bool) -> Manifest:
    """Make one data set of several: the samples of the first, then of the second, and so on.

    Tars are hard links, or copies where links are impossible or not wanted; side indices are written anew, because they
    name their tar. Duplicates across the data sets stay. A merge that was killed starts over when it is called again.

    Args:
        folders: of the data sets, or their manifests.
        out: folder of the new one.
        name: of the new one; shards are named by it.
        copy: never link.

    Raises:
        UserError: the data sets do not fit, lack files, have a shard in common, or ``out`` holds other data.
    """
    manifests = [load_manifest(folder) for folder in folders]
    _check(manifests)
    for manifest in manifests:
        check_files(manifest)
        if manifest.directory.resolve() == out.resolve():
            raise UserError(f"{out / MANIFEST_NAME} exists: choose another --out")
    make_folder(out)
    with sole_builder(out):
        merged = _finished(manifests, out, name) or _merge(manifests, out, name, copy)
    print_summary(merged)
    return merged


def _finished(manifests: Sequence[Manifest], out: Path, name: str) -> Manifest | None:
    """The data set, if a merge of the same was killed after its last step; else room for a new one is made.

    While a merge is at work, a file of its own tells that the shards without a manifest are links or copies of its
    making, which the next one may replace.
    """
    mark, wanted = _mark(out, name), _recipe(manifests)
    if (out / MANIFEST_NAME).exists():
        if not mark.exists() or read_json(mark, "mark of an interrupted merge") != wanted:
            raise UserError(f"{out / MANIFEST_NAME} exists: choose another --out")
        mark.unlink()
        return load_manifest(out)
    found = shards_in(out, {name})
    if not mark.exists():
        spare_tokenizer(out, manifests[0].tokenizer_file, manifests[0].tokenizer_sha256)
    if found and not mark.exists():
        raise UserError(f"{out} holds shards such as {min(found).name} but no manifest: choose another --out or --name")
    write_atomically(mark, canonical_json(wanted))
    for path in found:
        path.unlink()
    return None


def _mark(out: Path, name: str) -> Path:
    return out / f"{name}.merge.json"


def _recipe(manifests: Sequence[Manifest]) -> list[str]:
    return [manifest.fingerprint for manifest in manifests]


def _merge(manifests: Sequence[Manifest], out: Path, name: str, copy: bool) -> Manifest:
    splits: dict[str, PackedSplit] = {}
    for split in SPLITS:
        parts = [manifest for manifest in manifests if split in manifest.splits]
        if parts:
            splits[split] = PackedSplit(
                documents=sum(part.splits[split].documents for part in parts),
                samples=sum(part.splits[split].samples for part in parts),
                dropped_tokens=sum(part.splits[split].dropped_tokens for part in parts),
                token_counts=np.sum([_label_counts(part, split) for part in parts], axis=0),
                shards=_take_shards(parts, split, out, name, copy),
            )
    first = manifests[0]
    manifest = write_manifest(
        out,
        PackedData(
            name=name,
            sequence_length=first.sequence_length,
            vocab_size=first.vocab_size,
            eod_id=first.eod_id,
            dtype=first.dtype,
            tokenizer=first.tokenizer_file,
            tokenizer_sha256=first.tokenizer_sha256,
            splits=splits,
            statistics=_add([manifest.statistics for manifest in manifests]),
        ),
    )
    _mark(out, name).unlink()
    return manifest


def _label_counts(manifest: Manifest, split: str) -> npt.NDArray[np.int64]:
    # A manifest has the counts of the training split, which is large; the other is read.
    return manifest.token_counts if split == "train" else count_labels(manifest, split)


def _check(manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for manifest in manifests[1:]:
        for key in _SAME:
            if getattr(manifest, key) != getattr(first, key):
                raise UserError(
                    f"{manifest.directory} has {key} {getattr(manifest, key)}, {first.directory} "
                    f"{getattr(first, key)}: "
                    "only data sets of one tokenizer and length can be merged"
                )
    fingerprints = Counter(manifest.fingerprint for manifest in manifests)
    holder: dict[str, Manifest] = {}
    for manifest in manifests:
        if fingerprints[manifest.fingerprint] > 1:
            raise UserError(f"{manifest.directory} is given twice; its samples would be in the data twice")
        for shard in (shard for split in manifest.splits.values() for shard in split.shards):
            other = holder.setdefault(shard.sha256, manifest)
            if other is not manifest:
                raise UserError(
                    f"{manifest.directory} and {other.directory} both hold the content of {shard.file}; its samples "
                    "would be in the data twice"
                )


def _take_shards(parts: Sequence[Manifest], split: str, out: Path, name: str, copy: bool) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    for part in parts:
        for shard in part.splits[split].shards:
            source, target = part.directory / shard.file, out / f"{name}-{split}-{len(shards):06d}.tar"
            index = load_index(index_path(source), shard.index_sha256)
            _bring(source, target, copy)
            header = replace(index.header, tar=target.name)
            index_sha256 = write_index(index_path(target), header, index.offsets, index.rows, index.crc32)
            shards.append(replace(shard, file=target.name, index_sha256=index_sha256))
    return tuple(shards)


def _bring(source: Path, target: Path, copy: bool) -> None:
    """Put a file under another name, whole or not at all."""
    partial = partial_path(target)
    partial.unlink(missing_ok=True)
    try:
        if copy:
            shutil.copyfile(source, partial)
        else:
            try:
                os.link(source.resolve(), partial)
            except OSError:
                # Another file system, or one without links.
                shutil.copyfile(source, partial)
    except OSError as error:
        raise UserError(f"{source} cannot be copied to {target}: {error.strerror}") from error
    publish(target)


def _add(parts: Sequence[Statistics | None]) -> Statistics | None:
    """The statistics of all; None when any is unknown."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    dropped: Counter[str] = Counter()
    for part in known:
        dropped.update(part.dropped)
    text_bytes, tokens = sum(part.text_bytes for part in known), sum(part.document_tokens for part in known)
    return Statistics(
        records=sum(part.records for part in known),
        documents=sum(part.documents for part in known),
        duplicates=sum(part.duplicates for part in known),
        dropped=dict(sorted(dropped.items())),
        text_bytes=text_bytes,
        document_tokens=tokens,
        # Bytes of one part and tokens of another that has no text would make no ratio.
        bytes_per_token=round(text_bytes / tokens, 4) if all(part.text_bytes for part in known) else None,
    )
