"""Whole runs on a mixture: layouts, stages, curves, damage."""

from pathlib import Path

import pytest

from tests.pretrain import runs
from tests.pretrain.test_feed import damaged

pytestmark = pytest.mark.dist

SETTINGS = ["train.precision=fp32", "logging.every=1", "checkpoint.every=4", "validation.every=4"]


@pytest.fixture(scope="module")
def other(manifest: Path) -> Path:
    """The same text, cut and divided in another way."""
    folder = manifest.parent.parent
    runs.python(
        *("tools.shards", "build", "--input", str(folder / "documents.jsonl"), "--name", "other"),
        *("--tokenizer", str(folder / "tokenizer.model"), "--out", str(folder / "other")),
        *("--sequence-length", "64", "--validation-fraction", "0.3"),
    )
    return folder / "other" / "manifest.json"


def complete(log: Path, world_size: int, *settings: str) -> None:
    runs.finish(runs.start([*SETTINGS, *settings], world_size, log), log)


def test_a_mixture_goes_on_in_another_layout_and_then_changes(manifest: Path, other: Path, tmp_path: Path) -> None:
    mixed = f"data.datasets=[{{manifest: {manifest}, weight: 3}}, {{manifest: {other}}}]"
    data = ["data.manifest=null", mixed]
    whole, moved, log = tmp_path / "whole", tmp_path / "moved", tmp_path / "log"
    complete(log, 1, f"run.dir={whole}", *data, "train.steps=8", "optimizer.min_lr=2e-3")
    complete(log, 2, f"run.dir={moved}", *data, "train.steps=4", "optimizer.min_lr=2e-3")
    complete(log, 1, f"run.dir={moved}", *data, "train.steps=8", "optimizer.min_lr=2e-3")
    expected = runs.curve(whole, "train/loss")
    assert runs.curve(moved, "train/loss") == pytest.approx(expected, rel=1e-4)
    first, second = (runs.curve(whole, f"validation/loss/{name}") for name in ("data", "other"))
    mean = runs.curve(whole, "validation/loss")
    assert list(mean) == [4, 8]
    assert first[8] != second[8]
    assert mean == pytest.approx({step: 0.75 * first[step] + 0.25 * second[step] for step in mean}, rel=1e-5)
    bits, first_bits, second_bits = (
        runs.curve(whole, f"validation/bits_per_byte{name}") for name in ("", "/data", "/other")
    )
    assert bits == pytest.approx({step: 0.75 * first_bits[step] + 0.25 * second_bits[step] for step in bits}, rel=1e-5)
    assert runs.curve(moved, "validation/bits_per_byte") == pytest.approx(bits, rel=1e-4)  # 2 ranks up to step 4
    more = [f"run.dir={moved}", "train.steps=12", f"data.manifest={other}"]
    refused = tmp_path / "refused"
    (process,) = runs.start([*SETTINGS, *more], 1, refused)
    assert process.wait(180) == 2
    assert "go on with these from here by data.on_change=new_stage" in refused.read_text()
    complete(log, 2, *more, "data.on_change=new_stage", "validation.samples=500000")
    assert log.read_text().count("warning: validation.samples=500000, but data set other holds out ") == 1
    assert list(runs.curve(moved, "train/loss")) == list(range(1, 13))


def test_too_much_damage_ends_all_ranks_with_one_line(manifest: Path, tmp_path: Path) -> None:
    folder, log = damaged(manifest, tmp_path / "damaged", [*range(100)]), tmp_path / "log"
    settings = [f"data.manifest={folder}", f"run.dir={tmp_path / 'run'}", "data.max_bad_samples=0", "train.steps=500"]
    processes = runs.start([*SETTINGS, *settings], 2, log)
    assert [process.wait(180) for process in processes] == [2, 2]
    text = log.read_text()
    assert text.count("error: ") == 1
    assert "more than data.max_bad_samples=0 in a million; python -m tools.shards verify" in text
    assert "warning: masked, data set data: sample " in text
    assert "Traceback" not in text
