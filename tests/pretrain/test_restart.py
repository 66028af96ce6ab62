"""Runs that end, are killed, go on: always the losses of the run that nothing happened to, bit for bit."""

import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.pretrain import runs
from tests.pretrain.data.small import random_set

pytestmark = pytest.mark.dist

STEPS = 30
TAGS = ("train/loss", "train/grad_norm", "train/lr", "validation/loss")


def overrides(manifest: Path, run: Path, *more: str) -> list[str]:
    return [f"data.manifest={manifest}", f"run.dir={run}", f"train.steps={STEPS}", *more]


def complete(settings: list[str], world_size: int, log: Path) -> None:
    runs.finish(runs.start(settings, world_size, log), log)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with several documents in every sample."""
    data = random_set(tmp_path_factory.mktemp("documents") / "data", seed=2, train=50, validation=6)
    return data.directory / "manifest.json"


# Attention and positions within each document: what a resumed run must divide where the whole one does.
KILLED = ["parallel.tp=2", "data.separate_documents=true"]


@pytest.fixture(scope="module")
def uninterrupted(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    complete(overrides(documents, run, *KILLED), 2, run.parent / "log")
    return run


def test_every_step_has_a_point(uninterrupted: Path) -> None:
    assert list(runs.curve(uninterrupted, "train/loss")) == list(range(1, STEPS + 1))
    assert list(runs.curve(uninterrupted, "validation/loss")) == list(range(6, STEPS + 1, 6))
    assert sorted(p.name for p in (uninterrupted / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in range(3, STEPS + 1, 3)
    ]


def test_killed_runs_go_on_bit_for_bit(documents: Path, uninterrupted: Path, tmp_path: Path) -> None:
    killed_run_equals(documents, uninterrupted, tmp_path, kills=5)


def test_a_run_that_saved_while_another_started_is_not_overrun(
    uninterrupted: Path, documents: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    for step, place in ((3, run), (6, tmp_path)):
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(uninterrupted / name, place / name)
    late = ("tests.pretrain.late_run", str(tmp_path / name), str(run / name))
    (process,) = runs.start(overrides(documents, run, "data.separate_documents=true"), 1, log, module=late)
    assert process.wait(180) == 2, log.read_text()
    assert f"error: run.dir={run} is in use by another run" in log.read_text()


@pytest.mark.slow
def test_runs_killed_many_times_go_on_bit_for_bit(documents: Path, uninterrupted: Path, tmp_path: Path) -> None:
    killed_run_equals(documents, uninterrupted, tmp_path, kills=20)


def killed_run_equals(documents: Path, uninterrupted: Path, folder: Path, kills: int) -> None:
    """kill -9, by turns at a random moment, in the midst of a save and in an evaluation; few steps are gained."""
    run, log = folder / "killed", folder / "log"
    settings = overrides(documents, run, *KILLED)
    moments = random.Random(time.time_ns())
    hit = 0
    for attempt in range(kills):
        processes = runs.start(settings, 2, log)
        _wait_for_progress(log, attempt, processes)
        if attempt % 3 == 0:
            time.sleep(moments.uniform(0, 1.0 if kills < 10 else 0.3))
        elif attempt % 3 == 1:
            _wait_for_a_save(run, processes)
            time.sleep(moments.uniform(0, 0.03))
        else:
            _wait_for_an_evaluation(log, processes)
            time.sleep(moments.uniform(0, 0.02))
        hit += any(process.poll() is None for process in processes)
        runs.kill(processes)
    assert hit >= 3, "the runs ended before they were killed: " + log.read_text()
    complete(settings, 2, log)
    for tag in TAGS:
        assert runs.curve(run, tag) == runs.curve(uninterrupted, tag), tag
    assert not list((run / "checkpoints").glob(".partial-*"))


def _wait_for_progress(log: Path, starts_before: int, processes: list) -> None:
    """Until this start of the run trains, or has ended."""
    while log.read_text().count("run folder") <= starts_before and all(p.poll() is None for p in processes):
        time.sleep(0.02)


def _wait_for_a_save(run: Path, processes: list) -> None:
    while not list((run / "checkpoints").glob(".partial-*")) and all(process.poll() is None for process in processes):
        time.sleep(0.002)


def _wait_for_an_evaluation(log: Path, processes: list) -> None:
    """Until a step was reported whose evaluation follows, and whose checkpoint after that."""

    def reported() -> int:
        return len(re.findall(r"^step (6|12|18|24|30)/30  loss", log.read_text(), re.MULTILINE))

    before = reported()
    while reported() == before and all(process.poll() is None for process in processes):
        time.sleep(0.002)


LAYOUTS = {"one": (1, []), "tp2": (2, ["parallel.tp=2"]), "pp2": (2, ["parallel.pp=2"]), "dp2": (2, [])}

GPT2 = ["model.positions=learned", "model.linear_bias=true", "model.qk_norm=true"]


@pytest.mark.parametrize(
    ("saved", "loaded", "settings"),
    [("tp2", "pp2", GPT2), ("dp2", "one", []), ("pp2", "dp2", ["model.tie_embeddings=true", "train.precision=bf16"])],
)
def test_a_checkpoint_loads_in_another_layout(
    manifest: Path, tmp_path: Path, saved: str, loaded: str, settings: list[str]
) -> None:
    """The same run goes on in another layout: next losses as if it had stayed, up to rounding."""
    precise = "train.precision=bf16" not in settings
    settings = ["train.precision=fp32", *settings, "train.steps=8", "checkpoint.every=4", "logging.every=1"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    world_size, layout = LAYOUTS[saved]
    complete(overrides(manifest, whole, *layout, *settings), world_size, tmp_path / "whole.log")
    shutil.copytree(whole / "checkpoints/step-00000004", moved / "checkpoints/step-00000004")
    world_size, layout = LAYOUTS[loaded]
    complete(overrides(manifest, moved, *layout, *settings), world_size, tmp_path / "moved.log")
    expected, losses = runs.curve(whole, "train/loss"), runs.curve(moved, "train/loss")
    assert list(losses) == [5, 6, 7, 8]
    assert losses[5] == pytest.approx(expected[5], rel=1e-6 if precise else 2e-3)
    assert losses[8] == pytest.approx(expected[8], rel=1e-4 if precise else 2e-3)


def test_a_run_with_dropout_goes_on_bit_for_bit(manifest: Path, tmp_path: Path) -> None:
    """Through the end of a batch ramp-up, and into a decay."""
    ramp = ["train.rampup.start=2", "train.rampup.increment=2", "train.rampup.samples=8"]
    wsd = ["optimizer.schedule=wsd", "optimizer.decay_steps=2", "optimizer.decay_shape=minus_sqrt"]
    settings = [*ramp, *wsd]
    settings += ["parallel.tp=2", "model.dropout=0.2", "train.steps=6", "checkpoint.every=3", "logging.every=1"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    complete(overrides(manifest, whole, *settings), 2, tmp_path / "whole.log")
    shutil.copytree(whole / "checkpoints/step-00000003", resumed / "checkpoints/step-00000003")
    complete(overrides(manifest, resumed, *settings), 2, tmp_path / "resumed.log")
    assert list(runs.curve(whole, "train/global_batch").values()) == [2, 2, 2, 2, 4, 4]
    (record,) = (json.loads(path.read_text()) for path in resumed.glob("checkpoints/step-00000006/run.json"))
    assert (record["state"]["consumed_samples"], record["state"]["tokens"]) == (16, 16 * 32)
    for tag in ("train/loss", "train/grad_norm", "train/lr", "train/global_batch"):
        expected = runs.curve(whole, tag)
        assert runs.curve(resumed, tag) == {step: expected[step] for step in (4, 5, 6)}, tag
    assert runs.curve(resumed, "validation/loss") == {6: runs.curve(whole, "validation/loss")[6]}


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit(manifest: Path, tmp_path: Path) -> None:
    settings = ["train.compile=true", "train.steps=6", "checkpoint.every=3", "logging.every=6", "validation.every=3"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    complete(overrides(manifest, whole, *settings), 1, tmp_path / "whole.log")
    assert "torch.compile does not work" not in (tmp_path / "whole.log").read_text()
    shutil.copytree(whole / "checkpoints/step-00000003", resumed / "checkpoints/step-00000003")
    complete(overrides(manifest, resumed, *settings), 1, tmp_path / "resumed.log")
    for tag in ("train/loss", "train/grad_norm"):
        expected = runs.curve(whole, tag)
        assert runs.curve(resumed, tag) == {step: expected[step] for step in (4, 5, 6)}, tag


def test_a_run_goes_on_eager_where_there_is_no_compiler(manifest: Path, tmp_path: Path) -> None:
    settings = ["train.steps=3", "checkpoint.every=0", "logging.every=3", "validation.every=0"]
    complete(overrides(manifest, tmp_path / "eager", *settings), 1, tmp_path / "eager.log")
    log, settings = tmp_path / "log", overrides(manifest, tmp_path / "run", *settings, "train.compile=true")
    runs.finish(runs.start(settings, 1, log, module=("tests.pretrain.no_compiler_run",)), log)
    (line,) = [line for line in log.read_text().splitlines() if "train.compile" in line]
    assert line.startswith("warning: train.compile: torch.compile does not work on global rank 0 (")
    assert line.endswith("all layers run eager; install a C++ compiler, on GPUs Triton too, or leave it out")
    assert runs.curve(tmp_path / "run", "train/loss") == runs.curve(tmp_path / "eager", "train/loss")


def test_a_killed_run_leaves_no_process_behind(manifest: Path, tmp_path: Path) -> None:
    """A process that outlives its rank would hold the run's output open, and whoever waits for its end would hang."""
    run, log = tmp_path / "run", tmp_path / "log"
    (process,) = runs.start(overrides(manifest, run, "train.steps=100000"), 1, log)
    while not list(run.glob("checkpoints/step-*")) and process.poll() is None:
        time.sleep(0.02)
    children = _descendants(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while (alive := [child for child in children if Path(f"/proc/{child}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive, log.read_text()


def _descendants(parent: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return children + [pid for child in children for pid in _descendants(child)]
