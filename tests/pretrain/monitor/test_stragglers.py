import time

import torch

from pretrain.monitor.stopwatch import Stopwatch
from pretrain.monitor.stragglers import describe, slow_ranks


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
