"""Tokenising in one thread: what builds shards, from JSON lines to packed tokens, beside sentencepiece alone."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.tokenizer import Tokenizer
from tools.bench import pairs
from tools.bench.data_parts import Section
from tools.bench.report import table
from tools.corpus import DOCUMENTS_NAME, write_corpus
from tools.documents import VALIDATION_FRACTION
from tools.inputs import Reading, find_inputs
from tools.sharding.encode import UNIT_BYTES, Encoded, Encoder, Encoding, cut_units
from tools.tokenizer import train

Ids = npt.NDArray[np.int32]

ROUNDS = 5
VOCAB_SIZE = 8000
# Short enough that our encoder never cuts one, which would be an advantage over sentencepiece.
DOCUMENT_BYTES = 8000
OURS, RAW, RAW_LISTS = "ours", "sentencepiece, numpy", "sentencepiece, lists"


def measure(arguments: argparse.Namespace, folder: Path) -> Section:
    """Encode the same documents by turns; the peer gets the texts, ours finds them in their file."""
    documents, model = prepare(folder, arguments.text_bytes)
    turns = contenders(documents, model)
    tokens = sum(map(len, turns[RAW]()))
    text_bytes = sum(len(text.encode("utf-8")) for text in texts_of(documents))
    timings = pairs.interleave(turns, arguments.rounds or ROUNDS)
    cells = []
    for name, column in timings.items():
        rate = pairs.spread([text_bytes / timing.cpu / 1e6 for timing in column])
        ratio = pairs.ratio(timings, RAW, name, pairs.cpu)
        cells.append(
            [
                *(name, f"{rate.median:.2f}", f"{rate.minimum:.2f}-{rate.maximum:.2f}"),
                *(f"{tokens / text_bytes * rate.median:.2f}", f"{ratio.median:.2f}"),
                *(f"{ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}", f"{pairs.cores_given(column):.2f}"),
            ]
        )
    head = ["", "MB/CPU-s", "min-max", "Mtokens/CPU-s", f"/ {RAW}", "quartiles", "cpu/wall"]
    text = (
        f"{len(texts_of(documents))} documents, {text_bytes / 1e6:.1f} MB, {tokens} tokens, BPE of {VOCAB_SIZE}; ours "
        f"also reads and parses the lines, splits by hash and packs\nrounds: {len(timings[OURS])}; a ratio above 1 is "
        f"faster\n\n{table(head, cells)}"
    )
    rounds = {name: [dataclasses.asdict(timing) for timing in column] for name, column in timings.items()}
    return Section(text, {"text_bytes": text_bytes, "tokens": tokens, "rounds": rounds})


def prepare(folder: Path, text_bytes: int) -> tuple[Path, Path]:
    """A file of documents out of what every Python brings along, and a tokenizer trained on it."""
    write_corpus(folder, None, text_bytes, DOCUMENT_BYTES)
    documents, model = folder / DOCUMENTS_NAME, folder / "tokenizer.model"
    train([documents], VOCAB_SIZE, model, "bpe", 2_000_000, threads=1)
    return documents, model


def texts_of(documents: Path) -> list[str]:
    """The texts in a file of documents."""
    return [json.loads(line)["text"] for line in documents.read_text(encoding="utf-8").split("\n") if line]


def contenders(documents: Path, model: Path) -> dict[str, Callable[[], list[Any]]]:
    """Ways to encode the documents, each in one thread."""
    encoder = Encoder(
        Encoding(tokenizer=model, eod_id=None, reading=Reading(), validation_fraction=VALIDATION_FRACTION, hashed=False)
    )
    processor = Tokenizer(model).processor
    texts = texts_of(documents)
    files = find_inputs([documents])

    def ours() -> list[Encoded]:
        return [encoder.encode(unit) for unit in cut_units(files, Reading(), (0, 0), UNIT_BYTES)]

    def raw() -> list[Ids]:
        encoded: list[Ids] = processor.encode(texts, return_type="numpy", num_threads=1)
        return encoded

    def raw_lists() -> list[list[int]]:
        encoded: list[list[int]] = processor.encode(texts, num_threads=1)
        return encoded

    return {OURS: ours, RAW: raw, RAW_LISTS: raw_lists}
