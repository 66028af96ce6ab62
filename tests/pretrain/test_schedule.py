import itertools

import pytest

from pretrain.config import OptimizerSettings
from pretrain.schedule import is_due, learning_rate

SETTINGS = OptimizerSettings(lr=1.0, min_lr=0.1, warmup_steps=4)


def test_shape() -> None:
    rates = [learning_rate(step, 25, SETTINGS) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55)  # half of the cosine
    assert rates[24] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[4:]))


def test_no_warmup_and_one_step() -> None:
    settings = OptimizerSettings(lr=1.0)
    assert learning_rate(0, 10, settings) == 1.0
    assert learning_rate(9, 10, settings) == pytest.approx(0.0)
    assert learning_rate(0, 1, settings) == 1.0


def test_what_is_due_when() -> None:
    assert [step for step in range(1, 11) if is_due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 0, 10)] == [10]
