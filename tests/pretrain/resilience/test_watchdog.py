"""The watchdog in a process that hangs for real."""

import time
from pathlib import Path

import pytest

from pretrain.config import WatchdogSettings
from pretrain.resilience.watchdog import FIRST_STEPS, Watchdog
from tests.launch import environment, template


def hang(traces: Path, folder: Path) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a process that hangs."""
    out, err = folder / "out", folder / "err"
    process = template().start("tests.pretrain.resilience.hanging", [str(traces)], environment(0, 1, 1), out, err)
    return process.wait(60), out.read_text(), err.read_text()


def test_a_hang_leaves_stacks_and_ends(tmp_path: Path) -> None:
    status, out, err = hang(tmp_path, tmp_path)
    assert (status, out) == (75, "all is well\n")
    stacks = (tmp_path / "stacks-3.txt").read_text()
    assert "global rank 3 hangs: nothing for 0 s (limit 0 s) after 7 steps of this launch" in stacks
    assert "in hang_in_a_collective" in stacks
    assert f"stacks of all threads in {tmp_path / 'stacks-3.txt'}" in err
    assert "in hang_in_a_collective" not in err


def test_stacks_that_cannot_be_written_go_to_standard_error(tmp_path: Path) -> None:
    status, _, err = hang(tmp_path / "missing", tmp_path)
    assert status == 75
    assert "in hang_in_a_collective" in err


def watch(**settings: float) -> tuple[Watchdog, list[int]]:
    ends: list[int] = []
    return Watchdog(WatchdogSettings(**settings), 0, end=ends.append), ends


def test_the_first_steps_are_no_measure() -> None:
    dog, ends = watch(factor=2, floor_seconds=0.01, patience_minutes=100)
    for _ in range(FIRST_STEPS):
        dog.step_ended(0.001)
        dog.expect_step()
    time.sleep(0.2)
    dog.close()
    assert ends == []


def test_factor_0_turns_it_off() -> None:
    dog, ends = watch(factor=0, patience_minutes=1e-6)
    time.sleep(0.2)
    dog.close()
    assert ends == []


def test_a_step_of_more_samples_may_take_longer() -> None:
    dog, _ = watch(factor=5, floor_seconds=1)
    for _ in range(FIRST_STEPS + 3):
        dog.expect_step(8)
        dog.step_ended(2.0)
    assert dog.limit == 10.0
    dog.expect_step(32)
    assert dog.limit == 40.0
    dog.expect_step()
    assert dog.limit == 40.0
    dog.close()


@pytest.mark.parametrize(("seconds", "limit"), [(10.0, 50.0), (0.1, 30.0)])
def test_the_limit_follows_the_median(seconds: float, limit: float) -> None:
    dog, _ = watch(factor=5, floor_seconds=30)
    for each in (1000.0,) * FIRST_STEPS + (seconds,) * 5 + (500.0,):
        dog.step_ended(each)
    assert dog.limit == limit
    dog.close()
