"""From what was written to the manifest of a data set."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.files import partial_path, publish, sha256_of_file, write_atomically
from pretrain.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    NO_TOKENIZER,
    Description,
    Dtype,
    Manifest,
    Shard,
    Split,
    Statistics,
    load_manifest,
)
from pretrain.errors import UserError

TOKENIZER_NAME = "tokenizer.model"

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """What a split holds; as :class:`pretrain.data.manifest.Split`, with its int64 ``[vocab_size]`` label counts."""

    documents: int
    samples: int
    dropped_tokens: int
    token_counts: Counts
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """What a data set holds; as :class:`pretrain.data.manifest.Description`.

    Attributes:
        tokenizer: the model to be copied beside the manifest, if there is one.
    """

    name: str
    sequence_length: int
    vocab_size: int
    eod_id: int
    dtype: Dtype
    tokenizer: Path | None
    tokenizer_sha256: str
    splits: Mapping[str, PackedSplit]
    statistics: Statistics | None


def unigram_entropies(train: Counts, validation: Counts | None) -> dict[str, float]:
    """Per split, nats per token under the unigram distribution of the training split.

    Training: its own entropy. Validation: cross entropy under add-one smoothed training frequencies, since a validation
    token may be absent from the training split.
    """
    seen = train[train > 0]
    entropies = {"train": float(-np.sum(seen * np.log(seen / train.sum())) / train.sum())}
    if validation is not None:
        smoothed = (train + 1) / (train.sum() + len(train))
        entropies["validation"] = float(-np.sum(validation * np.log(smoothed)) / validation.sum())
    # Rounded, so that the last bit of a machine's logarithm does not enter the fingerprint.
    return {split: round(entropy, 6) for split, entropy in entropies.items()}


def spare_tokenizer(out: Path, tokenizer: Path | None, sha256: str) -> None:
    """UserError when the copy of the tokenizer would replace another one that lies in ``out``, perhaps the only one."""
    copy = out / TOKENIZER_NAME
    if tokenizer is not None and copy.exists() and sha256_of_file(copy) != sha256:
        raise UserError(f"{copy} is another tokenizer than {tokenizer}: move it, or choose another --out")


def write_manifest(out: Path, data: PackedData) -> Manifest:
    """Copy the tokenizer, write the manifest last, and read it back."""
    copy = out / TOKENIZER_NAME
    if data.tokenizer is not None and data.tokenizer.resolve() != copy.resolve():
        shutil.copyfile(data.tokenizer, partial_path(copy))
        publish(copy)
    counts = {split: packed.token_counts for split, packed in data.splits.items()}
    entropies = unigram_entropies(counts["train"], counts.get("validation"))
    description = Description(
        version=FORMAT_VERSION,
        name=data.name,
        sequence_length=data.sequence_length,
        vocab_size=data.vocab_size,
        eod_id=data.eod_id,
        dtype=data.dtype,
        tokenizer_file=TOKENIZER_NAME if data.tokenizer is not None else None,
        tokenizer_sha256=data.tokenizer_sha256 if data.tokenizer is not None else NO_TOKENIZER,
        token_counts=tuple(counts["train"].tolist()),
        splits={
            split: Split(
                documents=packed.documents,
                tokens=int(packed.token_counts.sum()),
                samples=packed.samples,
                dropped_tokens=packed.dropped_tokens,
                unigram_entropy=entropies[split],
                shards=packed.shards,
            )
            for split, packed in data.splits.items()
        },
        statistics=data.statistics,
    )
    write_atomically(out / MANIFEST_NAME, _manifest_text(description))
    return load_manifest(out / MANIFEST_NAME)


def _manifest_text(description: Description) -> bytes:
    """JSON to be read by people too: indented, with the long list of counts in one line at the end."""
    content = asdict(description)
    counts = json.dumps(content.pop("token_counts"))
    return (json.dumps(content, indent=2)[:-2] + f',\n  "token_counts": {counts}\n}}\n').encode("ascii")


def print_summary(manifest: Manifest) -> None:
    """A few lines on what a data set holds."""
    for name, split in manifest.splits.items():
        print(
            f"{name}: {split.documents} documents, {split.tokens} tokens, {split.samples} samples, "
            f"{len(split.shards)} shards, {split.dropped_tokens} tokens dropped, "
            f"unigram entropy {split.unigram_entropy:.4f} nats"
        )
    print(f"{manifest.directory / MANIFEST_NAME}: fingerprint {manifest.fingerprint}")
