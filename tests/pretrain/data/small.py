"""A small data set of real text, built by the tools themselves."""

import json
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import Manifest
from tools.shard_writer import ShardLayout, SplitWriter
from tools.sharding.description import PackedData, PackedSplit, write_manifest
from tools.sharding.megatron import GivenVocabulary
from tools.shards import Building, build
from tools.tokenizer import train

SEQUENCE_LENGTH = 32
RANDOM_VOCABULARY = GivenVocabulary(vocab_size=500, eod_id=0)

ODD_TEXTS = [
    "two  spaces,\n\n\tnewlines and tabs \r\n",
    "emoji 😀👩‍👩‍👧 and 中文, \u200b\ufeff",
    "a literal <|endoftext|> and <0x41> and <unk>",
    "   leading\nand trailing   \n",
]


def write_documents(path: Path, texts: list[str]) -> Path:
    """A .jsonl of these texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def real_texts(count: int) -> list[str]:
    """Documentation topics of Python."""
    return [topics[name] for name in sorted(topics)[:count]]


def layout(name: str = "small", samples_per_member: int = 8, members_per_shard: int = 6) -> ShardLayout:
    """Many members and shards from little text, the last ones incomplete."""
    return ShardLayout(
        name=name,
        sequence_length=SEQUENCE_LENGTH,
        samples_per_member=samples_per_member,
        members_per_shard=members_per_shard,
    )


def random_set(folder: Path, seed: int, train: int, validation: int, **sizes: int) -> Manifest:
    """A data set of random tokens, so that no two samples are equal; about a tenth of them end documents."""
    generator = np.random.default_rng(seed)
    tokens = {}
    for split, samples in (("train", train), ("validation", validation)):
        tokens[split] = generator.integers(1, RANDOM_VOCABULARY.vocab_size, samples * SEQUENCE_LENGTH + 1)
        tokens[split][generator.random(len(tokens[split])) < 0.1] = RANDOM_VOCABULARY.eod_id
    return write_set(folder, "small", RANDOM_VOCABULARY, layout(**sizes), tokens)


def write_set(
    folder: Path,
    name: str,
    vocabulary: GivenVocabulary,
    shape: ShardLayout,
    tokens: Mapping[str, npt.NDArray[np.int64]],
) -> Manifest:
    """A data set of these tokens, by split, each of them one document."""
    folder.mkdir(parents=True)
    splits = {}
    for split, of_split in tokens.items():
        writer = SplitWriter(folder, split, shape, vocabulary)
        writer.add_document(of_split)
        writer.finish()
        splits[split] = PackedSplit(
            documents=1,
            samples=writer.samples,
            dropped_tokens=writer.dropped_tokens,
            token_counts=writer.token_counts,
            shards=tuple(writer.shards),
        )
    return write_manifest(
        folder,
        PackedData(
            name=name,
            sequence_length=shape.sequence_length,
            vocab_size=vocabulary.vocab_size,
            eod_id=vocabulary.eod_id,
            dtype="<u2",
            tokenizer=None,
            tokenizer_sha256=vocabulary.sha256,
            splits=splits,
            statistics=None,
        ),
    )


def build_small(folder: Path) -> Manifest:
    """Documents, a tokenizer and shards under a folder."""
    documents = write_documents(folder / "documents.jsonl", real_texts(24) + ODD_TEXTS)
    train([documents], 600, folder / "tokenizer.model", "bpe", 10_000_000, threads=1)
    return build(
        Building(
            inputs=[documents],
            tokenizer=folder / "tokenizer.model",
            out=folder / "shards",
            layout=layout(),
            validation_fraction=0.2,
        )
    )
