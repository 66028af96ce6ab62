import time
from pathlib import Path

import pytest
import torch

from pretrain.monitor.stopwatch import Stopwatch
from pretrain.monitor.stragglers import describe, slow_ranks
from tests.pretrain import runs


def test_slow_ranks_are_named() -> None:
    seconds = [0.30, 0.31, 0.29, 0.62, 0.30, 0.50]
    assert slow_ranks(seconds) == [3, 5]
    assert describe(3, seconds, "node2") == "global rank 3 on node2: 0.620 s of work a step, 2.1 times the median rank"


def test_noise_is_no_straggler() -> None:
    assert slow_ranks([0.30, 0.31, 0.40]) == []
    assert slow_ranks([0.010, 0.010, 0.050]) == []
    assert slow_ranks([0.3]) == []


def test_of_two_ranks_the_slower_one_is_slow() -> None:
    assert slow_ranks([0.3, 0.6]) == [1]


def test_the_stopwatch_counts_laps_and_begins_anew() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.take() == 0.0
    for seconds in (0.02, 0.04):
        with watch.lap():
            time.sleep(seconds)
    assert 0.03 <= watch.take() < 1.0
    assert watch.take() == 0.0


@pytest.mark.dist
def test_a_rank_that_computes_slowly_is_named_once(manifest: Path, tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    settings = [f"data.manifest={manifest}", f"run.dir={run}", "train.steps=8", "train.global_batch=4"]
    settings += ["validation.every=0", "checkpoint.every=0", "train.precision=fp32"]
    runs.finish(runs.start(settings, 2, log, module=("tests.pretrain.slow_run",)), log)
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("slow: ")]
    assert line.startswith("slow: global rank 1 on ")
    assert " times the median rank" in line
    assert min(runs.curve(run, "throughput/slowest_rank").values()) > 1.5
