import dataclasses
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.reader import ShardReader
from pretrain.data.shard_index import load_index
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.pretrain.data.small import ODD_TEXTS, SEQUENCE_LENGTH, layout, real_texts, write_documents
from tools.documents import is_validation
from tools.shards import Building, build, main

TEXTS = real_texts(24) + ODD_TEXTS


def rebuild(manifest: Manifest, out: Path, *more: str, texts: list[str] = TEXTS, length: int = SEQUENCE_LENGTH) -> None:
    """Build by the command line what the small data set holds."""
    documents = write_documents(out.parent / "documents.jsonl", texts)
    arguments = ["--input", str(documents), "--tokenizer", str(manifest.tokenizer_file)]
    sizes = ["--sequence-length", str(length), "--samples-per-member", "8", "--members-per-shard", "6"]
    options = ["--validation-fraction", "0.2", "--name", "small", "--out", str(out)]
    main(["build", *arguments, *sizes, *options, *more])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_same_documents_give_the_same_bytes(manifest: Manifest, tmp_path: Path) -> None:
    rebuild(manifest, tmp_path / "again", "--workers", "2")
    assert contents(tmp_path / "again") == contents(manifest.directory)


def test_only_complete_files_are_left(manifest: Manifest) -> None:
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    indices = [file.replace(".tar", ".idx") for file in shards]
    assert set(contents(manifest.directory)) == {*shards, *indices, "manifest.json", "tokenizer.model"}
    assert shards[0] == "small-train-000000.tar"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_packing_loses_nothing_but_the_counted_tail(manifest: Manifest, split: str) -> None:
    texts = [text for text in TEXTS if is_validation(text, 0.2) == (split == "validation")]
    tokenizer = Tokenizer(manifest.tokenizer_file)
    stream = np.concatenate([[*tokenizer.processor.encode(text), tokenizer.eod_id] for text in texts], dtype=np.int64)
    reader = ShardReader(manifest, split, SEQUENCE_LENGTH)
    samples = [reader.read(sample_id) for sample_id in range(len(reader))]
    stored = np.concatenate([samples[0][:1], *(sample[1:] for sample in samples)])
    for before, after in pairwise(samples):
        assert before[-1] == after[0]
    described = manifest.splits[split]
    np.testing.assert_array_equal(stored, stream[: len(stored)])
    assert 0 <= described.dropped_tokens < SEQUENCE_LENGTH
    assert described.tokens + 1 == len(stored) == len(stream) - described.dropped_tokens
    assert described.documents == len(texts)
    complete = np.split(stored, np.flatnonzero(stored == tokenizer.eod_id) + 1)[:-1]
    assert len(complete) >= len(texts) - 3
    assert [tokenizer.decode(document) for document in complete] == texts[: len(complete)]


def test_counts_and_entropies_are_those_of_the_stored_tokens(manifest: Manifest) -> None:
    counts = {}
    for split in ("train", "validation"):
        reader = ShardReader(manifest, split, SEQUENCE_LENGTH)
        tokens: list[int] = []
        for sample_id in range(len(reader)):
            tokens += reader.read(sample_id)[1:].tolist()
        counts[split] = Counter(tokens)
    train, validation = counts["train"], counts["validation"]
    total = train.total()
    assert manifest.token_counts.tolist() == [train[token] for token in range(manifest.vocab_size)]
    entropy = sum(-count / total * np.log(count / total) for count in train.values())
    smoothed = {token: (train[token] + 1) / (total + manifest.vocab_size) for token in range(manifest.vocab_size)}
    cross = sum(-count * np.log(smoothed[token]) for token, count in validation.items()) / validation.total()
    assert manifest.splits["train"].unigram_entropy == pytest.approx(entropy, abs=1e-6)
    assert manifest.splits["validation"].unigram_entropy == pytest.approx(cross, abs=1e-6)
    assert 3 < entropy < np.log(manifest.vocab_size)


def test_stock_webdataset_reads_the_shards(manifest: Manifest) -> None:
    for split, described in manifest.splits.items():
        tars = [str(manifest.directory / shard.file) for shard in described.shards]
        members = list(wds.WebDataset(tars, shardshuffle=False).decode())
        blocks = [member["tokens.npy"] for member in members]
        assert len({member["__key__"] for member in members}) == len(members)
        reader = ShardReader(manifest, split, SEQUENCE_LENGTH)
        assert all(block.dtype == np.dtype("<u2") for block in blocks)
        np.testing.assert_array_equal(
            np.concatenate(blocks), [reader.read(sample_id) for sample_id in range(len(reader))]
        )


def test_a_document_longer_than_members_is_packed_like_any(manifest: Manifest, tmp_path: Path) -> None:
    train = next(text for text in ("word " * (20_000 + n) for n in range(100)) if not is_validation(text, 0.2))
    rebuild(manifest, tmp_path / "long", texts=[train, *TEXTS])
    built = load_manifest(tmp_path / "long")
    tokens = len(Tokenizer(manifest.tokenizer_file).encode_documents([train])[0])
    before, after = manifest.splits["train"], built.splits["train"]
    assert tokens > 8 * 6 * SEQUENCE_LENGTH
    assert after.tokens + after.dropped_tokens == before.tokens + before.dropped_tokens + tokens


def test_a_data_set_is_replaced_only_by_force(own_copy: Path, manifest: Manifest) -> None:
    with pytest.raises(UserError) as error:
        rebuild(manifest, own_copy)
    assert str(error.value) == (
        f"{own_copy}/manifest.json exists: choose another --out, or replace that data set by --force"
    )
    assert load_manifest(own_copy).fingerprint == manifest.fingerprint
    rebuild(manifest, own_copy, "--name", "other", "--members-per-shard", "1000", "--force")
    replaced = load_manifest(own_copy)
    assert (replaced.name, len(replaced.splits["train"].shards)) == ("other", 1)
    assert not list(own_copy.glob("small-*"))


def test_shards_without_a_manifest_are_not_overwritten_unasked(own_copy: Path, manifest: Manifest) -> None:
    (own_copy / "manifest.json").unlink()
    before = contents(own_copy)
    with pytest.raises(UserError) as error:
        rebuild(manifest, own_copy)
    assert str(error.value) == (
        f"{own_copy} holds shards such as small-train-000000.idx but no manifest: "
        "choose another --out, or replace them by --force"
    )
    assert contents(own_copy) == before
    rebuild(manifest, own_copy, "--force")
    assert contents(own_copy) == contents(manifest.directory)


def test_a_split_without_a_sample_is_refused_and_leaves_nothing(manifest: Manifest, tmp_path: Path) -> None:
    train = next(text for text in TEXTS if not is_validation(text, 0.2))
    with pytest.raises(UserError) as error:
        rebuild(manifest, tmp_path / "out", texts=[train])
    assert str(error.value) == (
        "the validation split has 0 documents with 0 tokens, too few for one sample of 33: "
        "raise --validation-fraction, lower --sequence-length, "
        "or give more documents (tools.corpus --max-document-bytes makes many of a long one)"
    )
    assert contents(tmp_path / "out") == {}
    with pytest.raises(UserError) as error:
        rebuild(manifest, tmp_path / "out", texts=[train], length=100_000)
    tokens = len(Tokenizer(manifest.tokenizer_file).encode_documents([train])[0])
    assert str(error.value) == (
        f"the train split has 1 documents with {tokens} tokens, too few for one sample of 100001: "
        "lower --validation-fraction, lower --sequence-length, "
        "or give more documents (tools.corpus --max-document-bytes makes many of a long one)"
    )


def test_bad_lines_are_named_and_the_rest_is_built(manifest: Manifest, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", TEXTS)
    lines = documents.read_bytes().splitlines(keepends=True)
    documents.write_bytes(b"".join([lines[0], b"{\n", *lines[1:], b"\n"]))
    out = tmp_path / "out"
    built = build(
        Building(
            inputs=[documents], tokenizer=manifest.tokenizer_file, out=out, layout=layout(), validation_fraction=0.2
        )
    )
    assert built.splits == manifest.splits
    assert built.statistics == dataclasses.replace(
        manifest.statistics, records=manifest.statistics.records + 2, dropped={"broken JSON": 1, "empty": 1}
    )
    assert (out / "small.dropped.txt").read_text().splitlines() == [
        f"{documents}:2: broken JSON",
        f"{documents}:{len(TEXTS) + 2}: empty",
    ]


def faults_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that verify prints, after it has refused the data set."""
    capsys.readouterr()
    with pytest.raises(UserError) as error:
        main(["verify", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert str(error.value) == f"{len(lines)} faults in {folder}: restore these files or build the shards anew"
    return lines


def test_verify_accepts_what_was_built(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", str(manifest.directory / "manifest.json")])
    assert capsys.readouterr().out == f"{manifest.directory} is sound: fingerprint {manifest.fingerprint}\n"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_verify_finds_every_damaged_file(
    own_copy: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third, fourth, *_ = (own_copy / shard.file for shard in manifest.splits["train"].shards)
    index = load_index(first.with_suffix(".idx"))
    flip(first, int(index.offsets[3]) + 8 * index.header.row_bytes - 1)
    flip(second, 0)
    third.write_bytes(third.read_bytes()[:-512])
    fourth.unlink()
    validation = own_copy / manifest.splits["validation"].shards[0].file
    flip(validation.with_suffix(".idx"), -1)
    flip(own_copy / "tokenizer.model", 1000)
    lines = faults_of(own_copy, capsys)
    assert lines[0] == "tokenizer.model: its sha256 is not the manifest's"
    assert lines[1] == (
        f"{first.name}: member 3: 1 of 8 samples, the first its sample 7, have another crc32 than the index"
    )
    assert lines[2].startswith(f"{second.name}: its sha256 is not the manifest's, though the samples are sound")
    size = third.stat().st_size
    assert lines[3] == f"{third.name}: {size} bytes, the manifest says {size + 512}"
    assert lines[4] == f"{fourth.name}: missing"
    assert lines[5].startswith(f"{validation.name}: shard index {validation.with_suffix('.idx')} is no")
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eod_id", 2, "tokenizer.model: tokenizer "),
        ("dtype", "<u4", "small-train-000000.tar: its index says dtype <u2, the manifest <u4"),
        ("sequence_length", 16, "small-train-000000.tar: its index says sample_length 33, the manifest 17"),
    ],
)
def test_verify_finds_a_manifest_that_contradicts_the_shards(
    own_copy: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, message: str
) -> None:
    path = own_copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert faults_of(own_copy, capsys)[0].startswith(message)


def test_verify_finds_wrong_counts(own_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_copy / "manifest.json"
    content = json.loads(path.read_text())
    content["token_counts"][5] += 1
    content["splits"]["validation"]["tokens"] += 1
    path.write_text(json.dumps(content))
    stored = content["splits"]["validation"]["tokens"] - 1
    assert faults_of(own_copy, capsys) == [
        "split train: token_counts in the manifest are not the shards'",
        f"split validation: {stored} tokens, the manifest says {stored + 1}",
    ]


def test_the_command_line_tells_a_mistake_in_one_line(tmp_path: Path) -> None:
    for arguments in (
        ["tools.shards", "verify", f"{tmp_path}/x.json"],
        ["tools.tokenizer", "inspect", f"{tmp_path}/x.json"],
        ["tools.corpus", "--out", str(tmp_path), "--text", f"{tmp_path}/x.json"],
    ):
        result = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert result.stderr.endswith(f"{tmp_path}/x.json does not exist\n")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [["--name", "a.b"], ["--sequence-length", "0"], ["--validation-fraction", "1"], ["--workers", "two"]]
)
def test_wrong_arguments_are_refused_by_the_parser(manifest: Manifest, tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        rebuild(manifest, tmp_path / "out", *wrong)
    assert exit_.value.code == 2
