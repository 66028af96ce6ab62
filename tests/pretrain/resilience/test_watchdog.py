"""The watchdog in a process that hangs for real."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.config import WatchdogSettings
from pretrain.resilience.watchdog import FIRST_STEPS, Watchdog
from tests.launch import REPOSITORY

HANGS = """
import sys, threading, time
from pathlib import Path
from pretrain.config import WatchdogSettings
from pretrain.resilience import watchdog

watchdog.GRACE_SECONDS = 0.2
watchdog.WRITE_SECONDS = 1.0
dog = watchdog.Watchdog(WatchdogSettings(factor=4, floor_seconds=0.3), global_rank=3)
dog.traces = Path(sys.argv[1])

def step(seconds):
    dog.expect_step()
    time.sleep(seconds)
    dog.step_ended(seconds)

def hang_in_a_collective():
    threading.Event().wait()

for _ in range(6):
    step(0.01)
step(0.2)  # longer than usual, but not longer than the floor
with dog.patience():
    time.sleep(0.5)
print("all is well", flush=True)
dog.expect_step()
hang_in_a_collective()
"""


def hang(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HANGS, str(folder)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )


def test_a_hang_leaves_stacks_and_ends(tmp_path: Path) -> None:
    ended = hang(tmp_path)
    assert ended.returncode == 75
    assert ended.stdout == "all is well\n"
    stacks = (tmp_path / "stacks-3.txt").read_text()
    assert "global rank 3 hangs: nothing for 0 s (limit 0 s) after 7 steps of this launch" in stacks
    assert "in hang_in_a_collective" in stacks
    assert f"stacks of all threads in {tmp_path / 'stacks-3.txt'}" in ended.stderr
    assert "in hang_in_a_collective" not in ended.stderr


def test_stacks_that_cannot_be_written_go_to_standard_error(tmp_path: Path) -> None:
    ended = hang(tmp_path / "missing")
    assert ended.returncode == 75
    assert "in hang_in_a_collective" in ended.stderr


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


@pytest.mark.parametrize(("seconds", "limit"), [(10.0, 50.0), (0.1, 30.0)])
def test_the_limit_follows_the_median(seconds: float, limit: float) -> None:
    dog, _ = watch(factor=5, floor_seconds=30)
    for each in (1000.0,) * FIRST_STEPS + (seconds,) * 5 + (500.0,):
        dog.step_ended(each)
    assert dog.limit == limit
    dog.close()
