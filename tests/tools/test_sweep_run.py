"""A real sweep of tiny runs: killed, interrupted, started again, finished; what diverged stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.sweeps import content, planned_run, write_grid
from tools.sweep.data import existing_data, samples_identity
from tools.sweep.grid import Grid, load_grid
from tools.sweep.plan import State, plan
from tools.sweep.results import Result, read_results
from tools.sweep.runner import Sweep, is_held

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.dist

FIRST, SECOND, HUGE = (f"rates/pre_norm/lr={rate}/seed=1" for rate in ("0.001", "0.01", "1.0e+30"))
SEEDS = "seeds/pre_norm/seed=2"
TASK_OF_SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "PRETRAIN_WORLD_SIZE": "1",
}
"""Of a sweep as a job: its trainers, several at once, must not take its place in the job, whose port is one."""


class Started:
    """A sweep in a process of its own, with what it prints."""

    def __init__(self, grid: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.sweep", grid, "--jobs", "2"],
                cwd=ROOT,
                env=os.environ | TASK_OF_SLURM,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Tests that run in the background were started with interrupts ignored, and would pass that on.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def until(self, condition: Callable[[str], bool]) -> None:
        """Wait for the output to fulfil ``condition``."""
        deadline = time.monotonic() + 240
        while not condition(self.log.read_text()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal to the sweep alone, or none; its exit status and output."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(240), self.log.read_text()


def trainers(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    tree = content()
    del tree["variants"]["geonorm"]
    tree["stages"]["rates"]["vary"]["optimizer.lr"] = [0.001, 0.01, 1e30]
    tree["stages"]["seeds"]["vary"]["train.seed"] = [2]
    return load_grid(write_grid(tmp_path_factory.mktemp("sweep"), tree))


@pytest.fixture(scope="module")
def kept(grid: Grid) -> Result:
    """The sweep is killed, and finished by another start; a result that was there before the kill."""
    log = grid.path.parent / "log"
    killed = Started(grid.path, log)
    # A run that was just started is still importing.
    killed.until(lambda text: "finished" in text and "started" in text.splitlines()[-1])
    orphans = trainers(killed.process.pid)
    _, text = killed.end(signal.SIGKILL)
    newest = text.splitlines()[-1].split()[1].rstrip(":")
    run = next(run for run in grid.runs if run.id == newest)
    assert is_held(grid.folder(run)), "a trainer that outlives its sweep keeps its run"
    os.kill(orphans[-1], signal.SIGKILL)
    first = next(iter(read_results(grid.results_folder).values()))

    status, text = Started(grid.path, log).end()
    assert status == 0, text
    assert f"{first.id}: started" not in text, "a finished run is skipped"
    assert f"{newest}: started" in text, "what was killed is not finished"
    return first


def test_all_runs_have_results(grid: Grid, kept: Result) -> None:
    results = read_results(grid.results_folder)
    assert {run_id: result.status for run_id, result in results.items()} == {
        FIRST: "finished",
        SECOND: "finished",
        HUGE: "diverged",
        SEEDS: "finished",
    }
    assert results[kept.id] == kept, "a recorded result is not touched"
    for result in results.values():
        assert (result.steps, result.tokens) == (8, 8 * 128)
        assert [step for step, _ in result.train] == list(range(1, 9))
        assert result.seconds > 0
    assert [step for step, _ in results[SEEDS].validation] == [4, 8]
    assert results[HUGE].steps_not_finite >= 4
    assert "not finite at step 8" in str(results[HUGE].reason)
    assert results[SEEDS].steps_not_finite == 0


def test_the_best_rate_was_taken(grid: Grid, kept: Result) -> None:
    results = read_results(grid.results_folder)
    losses = {results[run_id].final_loss: rate for run_id, rate in ((FIRST, 0.001), (SECOND, 0.01))}
    assert results[SEEDS].settings["optimizer.lr"] == losses[min(loss for loss in losses if loss is not None)]


def test_nothing_is_left_to_do(grid: Grid, kept: Result) -> None:
    before = (grid.results_folder / "results.jsonl").read_bytes()
    data = existing_data(grid)
    assert data is not None
    planned = Sweep(grid, data, 2, lambda run: True, lambda: pytest.fail("a run ended")).work()
    assert {each.run.id: each.state for each in planned} == {
        FIRST: State.FINISHED,
        SECOND: State.FINISHED,
        HUGE: State.DIVERGED,
        SEEDS: State.FINISHED,
    }
    assert (grid.results_folder / "results.jsonl").read_bytes() == before


def test_table_and_picture_are_there(grid: Grid, kept: Result) -> None:
    row = next(line for line in (grid.results_folder / "table.md").read_text().splitlines() if "| pre_norm" in line)
    assert "1 diverged" in row
    assert (grid.results_folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoints_are_gone_and_curves_stay(grid: Grid, kept: Result) -> None:
    for run in grid.runs:
        assert not (grid.run_dir(run) / "checkpoints").exists()
        assert list((grid.run_dir(run) / "tensorboard").iterdir())


def test_the_data_is_the_grids(grid: Grid, kept: Result) -> None:
    data = existing_data(grid)
    assert data is not None
    assert {result.data for result in read_results(grid.results_folder).values()} == {samples_identity(data)}
    assert (data.vocab_size, data.sequence_length) == (600, 32)
    other = Grid(
        grid.path, grid.file.model_copy(update={"data": grid.file.data.model_copy(update={"vocab_size": 601})}), ()
    )
    assert existing_data(other) is None
    assert {each.state for each in plan(grid, read_results(grid.results_folder), data)} == {
        State.FINISHED,
        State.DIVERGED,
    }
    assert planned_run(grid, HUGE, read_results(grid.results_folder)).state == State.DIVERGED


def test_an_interrupt_ends_the_trainers_and_counts_nothing(grid: Grid, kept: Result) -> None:
    tree = content() | {"stages": {"long": {"settings": {"train.steps": 100_000}, "vary": {"train.seed": [1]}}}}
    del tree["variants"]["geonorm"]
    folder = grid.path.parent / "long"
    folder.mkdir()
    (folder / "work").symlink_to(grid.file.work)  # the same data
    long = load_grid(write_grid(folder, tree))
    (run,) = long.runs
    sweep = Started(long.path, folder / "log")
    sweep.until(lambda text: (long.run_dir(run) / "tensorboard").exists())
    (trainer,) = trainers(sweep.process.pid)
    try:
        status, text = sweep.end(signal.SIGINT)
        assert (status, text.splitlines()[-1]) == (130, "interrupted")
        assert not Path(f"/proc/{trainer}").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGKILL)
    assert not is_held(long.folder(run))
    assert read_results(long.results_folder) == {}
