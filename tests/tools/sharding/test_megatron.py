"""Megatron's own writer makes the files; older formats are written here byte by byte."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from pretrain.data.manifest import NO_TOKENIZER, load_manifest
from pretrain.errors import UserError
from tools.documents import is_validation
from tools.sharding.scan import blocks_of
from tools.shards import main

VOCABULARY, EOD = 70_000, 5


def documents_of(count: int = 60) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [[*generator.integers(6, VOCABULARY, size=generator.integers(1, 60)).tolist(), EOD] for _ in range(count)]


def write_by_megatron(prefix: Path, documents: list[list[int]], dtype: type[np.number] = np.int32) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        half = len(document) // 2
        for part in (document[:half], document[half:]):
            builder.add_item(torch.tensor(part, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_mapped_without_documents(prefix: Path, documents: list[list[int]]) -> None:
    lengths = [len(document) for document in documents]
    starts = np.cumsum([0, *lengths[:-1]]) * 4
    head = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 4, len(documents))
    content = head + np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(content)
    prefix.with_name(prefix.name + ".bin").write_bytes(np.concatenate(documents).astype("<i4").tobytes())


def write_older(prefix: Path, documents: list[list[int]], with_documents: bool) -> None:
    lengths = [len(document) for document in documents]
    count, ends = len(documents), np.cumsum([0, *lengths])
    head = b"TNTIDX\0\0" + struct.pack("<QQQQQ", 1, 5, 8, count, count)
    index = np.arange(count + 1)
    parts = [index, ends, lengths, *([index] if with_documents else [])]
    head += struct.pack("<Q", count + 1) if with_documents else b""
    content = head + b"".join(np.array(part, "<i8").tobytes() for part in parts)
    prefix.with_name(prefix.name + ".idx").write_bytes(content)
    prefix.with_name(prefix.name + ".bin").write_bytes(np.concatenate(documents).astype("<i8").tobytes())


def run(prefix: Path, out: Path, *more: str) -> None:
    sizes = ["--sequence-length", "16", "--samples-per-member", "4", "--members-per-shard", "5"]
    vocabulary = ["--vocab-size", str(VOCABULARY), "--eod-id", str(EOD)]
    main(
        ["import-megatron", str(prefix), "--out", str(out), "--validation-fraction", "0.2", *vocabulary, *sizes, *more]
    )


WRITERS: dict[str, Callable[[Path, list[list[int]]], None]] = {
    "megatron": write_by_megatron,
    "without documents": write_mapped_without_documents,
    "older": lambda prefix, documents: write_older(prefix, documents, True),
    "older, without documents": lambda prefix, documents: write_older(prefix, documents, False),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_document_is_imported(tmp_path: Path, writer: str, capsys: pytest.CaptureFixture[str]) -> None:
    documents = documents_of()
    WRITERS[writer](tmp_path / "corpus_text", documents)
    run(tmp_path / "corpus_text", tmp_path / "out")
    built = load_manifest(tmp_path / "out")
    assert (built.tokenizer_file, built.tokenizer_sha256, built.dtype) == (None, NO_TOKENIZER, "<u4")
    for split in ("train", "validation"):
        mine = [
            document
            for document in documents
            if is_validation(np.array(document[:-1], "<u4").tobytes(), 0.2) == (split == "validation")
        ]
        stream = [token for document in mine for token in document]
        rows = np.concatenate(list(blocks_of(built, split)))
        stored = [int(rows[0, 0]), *rows[:, 1:].ravel().tolist()]
        assert stored == stream[: len(stored)]
        assert len(stream) - len(stored) == built.splits[split].dropped_tokens < 16
    capsys.readouterr()
    main(["verify", str(tmp_path / "out")])
    assert "is sound" in capsys.readouterr().out


def test_documents_without_an_end_get_one_and_bad_ones_are_counted(tmp_path: Path) -> None:
    documents = documents_of()
    prefix = tmp_path / "corpus"
    WRITERS["megatron"](prefix, documents)
    run(prefix, tmp_path / "with")
    bare = [document[:-1] for document in documents]
    other = tmp_path / "bare"
    WRITERS["megatron"](other, [*bare[:7], [EOD, EOD][1:], [9, VOCABULARY], *bare[7:], bare[3]])
    run(other, tmp_path / "without", "--deduplicate")
    whole, imported = load_manifest(tmp_path / "with"), load_manifest(tmp_path / "without")
    assert whole.splits == imported.splits
    assert imported.statistics is not None
    assert imported.statistics.dropped == {"empty": 1, f"token outside the vocabulary of {VOCABULARY}": 1}
    assert (imported.statistics.records, imported.statistics.duplicates) == (63, 1)
    assert imported.statistics.bytes_per_token is None
    listed = (tmp_path / "without" / "data.dropped.txt").read_text().splitlines()
    assert listed[0] == f"{other}.bin:document 7: empty"


def test_uint16_and_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    documents = [[token % 600 for token in document[:-1]] + [EOD] for document in documents_of()]
    write_by_megatron(tmp_path / "small", documents, np.uint16)
    run(tmp_path / "small", tmp_path / "out", "--vocab-size", "600")
    assert load_manifest(tmp_path / "out").dtype == "<u2"


def test_damaged_files_are_told_in_one_line(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_by_megatron(prefix, documents_of())
    index, binary = tmp_path / "corpus.idx", tmp_path / "corpus.bin"
    sound = index.read_bytes()
    size = binary.stat().st_size
    for content, message in (
        (sound[:-8], f"{index} is no index that Megatron wrote: it has {len(sound) - 8} bytes instead of {len(sound)}"),
        (b"x" + sound[1:], f"{index} is no index that Megatron wrote: it begins with other bytes"),
        (
            sound[:17] + b"\7" + sound[18:],
            f"{index} is no index that Megatron wrote: type code 7 is none of whole numbers",
        ),
        (
            sound[:34] + b"\1" + sound[35:],
            f"{index} is no index that Megatron wrote: its sequences do not follow one another",
        ),
        (
            sound[:-8] + bytes(8),
            f"{index} is no index that Megatron wrote: its document index does not run from the first sequence to the "
            "last",
        ),
        (b"", f"{index} is no index that Megatron wrote: it begins with other bytes"),
    ):
        index.write_bytes(content)
        with pytest.raises(UserError) as error:
            run(prefix, tmp_path / "out")
        assert str(error.value) == message
    index.write_bytes(sound)
    binary.write_bytes(binary.read_bytes()[:-4])
    with pytest.raises(UserError) as error:
        run(prefix, tmp_path / "out")
    assert str(error.value) == f"{binary} has {size - 4} bytes, its index says {size}"
    with pytest.raises(UserError) as error:
        run(tmp_path / "nowhere", tmp_path / "out")
    assert str(error.value) == f"{tmp_path}/nowhere.idx does not exist; give both files' path without .bin and .idx"
    with pytest.raises(UserError) as error:
        main(["import-megatron", str(prefix), "--out", str(tmp_path / "out"), "--sequence-length", "8"])
    assert str(error.value) == "give --tokenizer, or both --vocab-size and --eod-id"
