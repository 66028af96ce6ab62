"""Runs that end, are killed, go on: always the losses of the run that nothing happened to, bit for bit."""

import random
import time
from pathlib import Path

import pytest

from tests.pretrain import runs

pytestmark = pytest.mark.dist

STEPS = 30
TAGS = ("train/loss", "train/grad_norm", "train/lr", "validation/loss")


def overrides(manifest: Path, run: Path, *more: str) -> list[str]:
    return [f"data.manifest={manifest}", f"run.dir={run}", f"train.steps={STEPS}", *more]


def complete(settings: list[str], world_size: int, log: Path) -> None:
    runs.finish(runs.start(settings, world_size, log), log)


@pytest.fixture(scope="module")
def uninterrupted(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "uninterrupted"
    complete(overrides(manifest, run, "parallel.tp=2"), 2, run.parent / "log")
    return run


def test_every_step_has_a_point(uninterrupted: Path) -> None:
    assert list(runs.curve(uninterrupted, "train/loss")) == list(range(1, STEPS + 1))
    assert list(runs.curve(uninterrupted, "validation/loss")) == list(range(6, STEPS + 1, 6))
    assert sorted(p.name for p in (uninterrupted / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in range(3, STEPS + 1, 3)
    ]


def test_killed_runs_go_on_bit_for_bit(manifest: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """kill -9 at random moments and in the midst of saves."""
    run, log = tmp_path / "killed", tmp_path / "log"
    settings = overrides(manifest, run, "parallel.tp=2")
    moments = random.Random(time.time_ns())
    kills = 0
    for attempt in range(5):
        processes = runs.start(settings, 2, log)
        _wait_for_progress(run, log, processes)
        if attempt % 2:
            _wait_for_a_save(run, processes)
        else:
            time.sleep(moments.uniform(0, 1.5))
        kills += any(process.poll() is None for process in processes)
        runs.kill(processes)
    assert kills >= 3, "the runs ended before they were killed: " + log.read_text()
    complete(settings, 2, log)
    for tag in TAGS:
        assert runs.curve(run, tag) == runs.curve(uninterrupted, tag), tag
    assert not list((run / "checkpoints").glob(".partial-*"))


def _wait_for_progress(run: Path, log: Path, processes: list) -> None:
    """Until this start of the run has trained: an event file of its own with more than the header."""
    known = log.read_text().count("run folder")
    while log.read_text().count("run folder") == known and all(process.poll() is None for process in processes):
        time.sleep(0.02)


def _wait_for_a_save(run: Path, processes: list) -> None:
    while not list((run / "checkpoints").glob(".partial-*")) and all(process.poll() is None for process in processes):
        time.sleep(0.002)


def test_a_checkpoint_loads_in_another_layout(manifest: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Saved with tp 2; goes on with pp 2 and with one process, to nearly the same losses."""
    import shutil

    expected = runs.curve(uninterrupted, "train/loss")
    for name, world_size, layout in (("pp2", 2, ["parallel.pp=2"]), ("one", 1, [])):
        run = tmp_path / name
        (run / "checkpoints").mkdir(parents=True)
        shutil.copytree(uninterrupted / "checkpoints/step-00000015", run / "checkpoints/step-00000015")
        complete(overrides(manifest, run, *layout), world_size, tmp_path / f"{name}.log")
        losses = runs.curve(run, "train/loss")
        assert list(losses) == list(range(16, STEPS + 1))
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=2e-3), (name, step)


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
