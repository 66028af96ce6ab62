"""Whole runs on raw text: killed, resumed, damaged, refused."""

import itertools
import json
import shutil
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pretrain.data.cursor import Cursor
from pretrain.data.tokenizer import Tokenizer
from tests.launch import launch
from tests.pretrain import runs
from tests.pretrain.data import raw

pytestmark = pytest.mark.dist

STEPS = 9
TAGS = ("train/loss", "train/grad_norm", "validation/loss", "validation/bits_per_byte")
TAGS += ("data/documents", "data/lost_documents")


@pytest.fixture(scope="module")
def text(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five unequal shards, one of them damaged, of less text than a run reads; and a held-out one."""
    folder = tmp_path_factory.mktemp("text")
    shutil.copy(manifest.parent.parent / "tokenizer.model", folder)
    lines = (manifest.parent.parent / "documents.jsonl").read_text().splitlines()
    texts = (json.loads(line)["text"][:60] for line in lines)
    for name, size in {"0": 4, "1": 1, "2": 6, "3": 2, "4": 3, "held-out": 12}.items():
        raw.write_texts(folder / f"{name}.tar", itertools.islice(texts, size), "json" if name == "2" else "txt")
    raw.damage(folder / "2.tar", raw.header_of(folder / "2.tar", 4), b"\xff")
    return folder


def settings(text: Path, run: Path, *more: str) -> list[str]:
    return [
        *("data.manifest=null", "data.mode=stream", f"data.urls={text}/{{0..4}}.tar", "model.output_bias=learned"),
        *(f"data.validation_urls={text}/held-out.tar", f"data.tokenizer={text}/tokenizer.model", f"run.dir={run}"),
        *(f"train.steps={STEPS}", "logging.every=3", "data.max_bad_samples=1000", *more),
    ]


def complete(arguments: list[str], world_size: int, log: Path) -> str:
    runs.finish(runs.start(arguments, world_size, log), log)
    return log.read_text()


def refused(arguments: list[str], world_size: int, log: Path) -> str:
    """The one line of error that all processes together print."""
    processes = runs.start(arguments, world_size, log)
    try:
        assert [process.wait(180) for process in processes] == [2] * world_size, log.read_text()
    finally:
        runs.kill(processes)
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert "Traceback" not in log.read_text()
    return line


def test_a_killed_run_of_two_ranks_goes_on_bit_for_bit(text: Path, tmp_path: Path) -> None:
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    said = complete(settings(text, whole), 2, tmp_path / "whole.log")
    assert said.startswith("data.mode=stream reads 5 shards of raw text. It does not promise: ")
    assert "4 documents arrived, 2 were lost" in said
    processes = runs.start(settings(text, killed), 2, log)
    while not (killed / "checkpoints/step-00000003").exists() and all(p.poll() is None for p in processes):
        time.sleep(0.01)
    runs.kill(processes)
    assert (killed / "checkpoints/step-00000003").exists(), log.read_text()
    assert not (killed / f"checkpoints/step-{STEPS:08d}").exists(), "it ended before it was killed"
    complete(settings(text, killed), 2, log)
    for tag in TAGS:
        assert runs.curve(killed, tag) == runs.curve(whole, tag), tag
    assert max(runs.curve(whole, "data/lost_documents").values()) >= 2
    streams = [
        json.loads((run / f"checkpoints/step-{STEPS:08d}/run.json").read_text())["state"]["data"]["stream"]
        for run in (whole, killed)
    ]
    assert streams[0] == streams[1]
    assert len(streams[0]) == 2
    assert all(cursor["epoch"] > 0 for cursor in streams[0]), "the run must reach into other epochs"
    line = refused(settings(text, killed, f"train.steps={STEPS + 1}"), 1, tmp_path / "one.log")
    assert "was saved by 2 data-parallel ranks, and these are 1: data.mode=stream goes on with as many only" in line


def test_one_rank_goes_on_bit_for_bit_also_with_tensor_parallel_ranks(text: Path, tmp_path: Path) -> None:
    precise = ["train.precision=fp32", "logging.every=1", "data.separate_documents=true"]
    whole, alone, split = tmp_path / "whole", tmp_path / "alone", tmp_path / "split"
    complete(settings(text, whole, *precise), 1, tmp_path / "whole.log")
    for run in (alone, split):
        shutil.copytree(whole / "checkpoints/step-00000006", run / "checkpoints/step-00000006")
    complete(settings(text, alone, *precise), 1, tmp_path / "alone.log")
    complete(settings(text, split, *precise, "parallel.tp=2"), 2, tmp_path / "split.log")
    for tag in ("train/loss", "train/grad_norm", "data/documents", "data/lost_documents"):
        expected = {step: value for step, value in runs.curve(whole, tag).items() if step > 6}
        assert expected
        assert runs.curve(alone, tag) == expected, tag
        assert runs.curve(split, tag) == pytest.approx(expected, rel=1e-4), tag
    runs.python("pretrain", "export", str(split), "--out", str(tmp_path / "out"))
    ours, theirs = Tokenizer(text / "tokenizer.model"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token_id, theirs("a text").input_ids) == (ours.eod_id, ours.processor.encode("a text"))


def test_too_much_damage_ends_all_ranks_with_one_line(text: Path, tmp_path: Path) -> None:
    arguments = settings(text, tmp_path / "run", "data.max_bad_samples=1", "validation.every=0", "logging.every=1")
    line = refused(arguments, 2, tmp_path / "log")
    assert line.startswith("error: damaged tars cost 2 documents, ")
    assert line.endswith("restore the shards that the warnings above name, or raise it")


def test_pipeline_stages_read_the_same_or_stop(text: Path, tmp_path: Path) -> None:
    """The one in the middle reads nothing, keeps no other waiting, and ends with them."""
    folders = [tmp_path / str(stage) for stage in range(3)]
    for stage, folder in enumerate(folders):
        folder.mkdir()
        texts = [f"text {number} of one stage or all" for number in range(9)]
        raw.write_texts(folder / "same.tar", texts)
        raw.write_texts(folder / "other.tar", texts[: 8 if stage == 2 else 9])
    outputs = launch("tests.pretrain.stream_worker", 3, str(text / "tokenizer.model"), *map(str, folders))
    first, middle, last = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first["same"] == last["same"]
    assert first["same"]["error"] is None
    assert len(set(map(tuple, first["same"]["cursors"]))) == 4
    assert middle["same"] == {"sums": [0] * 4, "cursors": [list(Cursor().numbers())] * 4, "error": None}
    error = first["other"]["error"]
    assert error == middle["other"]["error"] == last["other"]["error"]
    assert error.startswith("by step 2 ranks of one tensor- and pipeline-parallel group have read other texts")
