"""As nanoGPT's data/openwebtext/prepare.py writes: every document's tokens, its end, all in one file of uint16."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.manifest import NO_TOKENIZER, load_manifest
from pretrain.errors import UserError
from tools.sharding.scan import blocks_of
from tools.shards import main

EOT = 50256


def documents_of(seed: int, count: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [[*generator.integers(0, EOT, size=generator.integers(1, 60)).tolist(), EOT] for _ in range(count)]


def write(path: Path, documents: list[list[int]]) -> Path:
    np.concatenate(documents).astype(np.uint16).tofile(path)
    return path


def run(out: Path, *arguments: str) -> None:
    sizes = ["--sequence-length", "16", "--samples-per-member", "4", "--members-per-shard", "5"]
    main(["import-nanogpt", *arguments, "--out", str(out), *sizes])


def test_every_token_of_its_file_in_its_split(tmp_path: Path) -> None:
    parts = {name: documents_of(seed, 40) for seed, name in enumerate(("one", "two", "val"))}
    files = {name: str(write(tmp_path / f"{name}.bin", documents)) for name, documents in parts.items()}
    run(tmp_path / "out", files["one"], files["two"], "--validation", files["val"])
    built = load_manifest(tmp_path / "out")
    assert (built.vocab_size, built.eod_id, built.dtype, built.tokenizer_sha256) == (50257, EOT, "<u2", NO_TOKENIZER)
    for split, names in (("train", ("one", "two")), ("validation", ("val",))):
        stream = [token for name in names for document in parts[name] for token in document]
        rows = np.concatenate(list(blocks_of(built, split)))
        stored = [int(rows[0, 0]), *rows[:, 1:].ravel().tolist()]
        assert stored == stream[: len(stored)]
        assert len(stream) - len(stored) == built.splits[split].dropped_tokens < 16
        assert built.splits[split].documents == sum(len(parts[name]) for name in names)


def test_without_a_val_bin_a_share_is_held_out_and_a_cut_file_gets_its_end(tmp_path: Path) -> None:
    documents = documents_of(5, 60)
    documents[-1] = documents[-1][:-1] or [7]
    run(tmp_path / "out", str(write(tmp_path / "train.bin", documents)), "--validation-fraction", "0.3")
    built = load_manifest(tmp_path / "out")
    assert 0 < built.splits["validation"].documents < 40
    assert sum(split.documents for split in built.splits.values()) == 60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "train.bin does not exist"),
        (b"", "train.bin has 0 bytes, which are no uint16 tokens"),
        (b"abc", "train.bin has 3 bytes, which are no uint16 tokens"),
        (bytes(8), "holds no token 50256, which should end its documents"),
        (
            np.arange(EOT - 40, EOT + 1, dtype="<u4").tobytes(),
            "train.bin holds wider numbers: every second uint16 is 0",
        ),
        (
            np.arange(EOT - 40, EOT + 1, dtype="<i8").tobytes(),
            "train.bin holds wider numbers: every second uint16 is 0",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", str(tmp_path / "train.bin"))


def test_a_file_is_not_both_trained_on_and_held_out(tmp_path: Path) -> None:
    names = [str(write(tmp_path / f"{name}.bin", documents_of(7, 9))) for name in ("train", "val")]
    with pytest.raises(UserError, match=r"val\.bin is given twice"):
        run(tmp_path / "out", *names, "--validation", names[1])
