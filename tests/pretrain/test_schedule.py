import itertools
from typing import Any

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


def rates(steps: int, **settings: Any) -> list[float]:
    optimizer = OptimizerSettings(**{"lr": 1.0, "min_lr": 0.2, "warmup_steps": 2} | settings)
    return [learning_rate(step, steps, optimizer) for step in range(steps)]


def test_linear_and_constant() -> None:
    assert rates(7, schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(7, schedule="constant") == [0.5, *[1.0] * 6]
    assert rates(3, schedule="linear", warmup_steps=0) == pytest.approx([1.0, 0.6, 0.2])


def test_wsd_is_stable_then_decays_then_stays() -> None:
    decay = [0.8, 0.6, 0.4, 0.2]
    assert rates(8, schedule="wsd", decay_steps=4) == pytest.approx([0.5, 1.0, 1.0, 1.0, *decay])
    assert rates(8, schedule="wsd", decay_start=4) == pytest.approx([0.5, 1.0, 1.0, 1.0, *decay])
    assert rates(9, schedule="wsd", decay_start=3, decay_steps=4) == pytest.approx([0.5, 1.0, 1.0, *decay, 0.2, 0.2])
    assert rates(40, schedule="wsd")[35:] == pytest.approx([1.0, *decay])  # a tenth


@pytest.mark.parametrize(("shape", "third"), [("linear", 0.25), ("cosine", 0.146447), ("minus_sqrt", 0.133975)])
def test_a_decay_has_a_shape(shape: str, third: float) -> None:
    found = rates(9, schedule="wsd", decay_steps=4, decay_shape=shape)
    assert found[4] == 1.0
    assert found[7:] == pytest.approx([0.2 + 0.8 * third, 0.2], rel=1e-5)


def test_a_checkpoint_of_the_stable_phase_goes_on_in_any_run_that_is_stable_there() -> None:
    """Past steps have the same rates in a shorter run, in a longer one, and in one that never decays."""
    short, long = rates(20, schedule="wsd", decay_steps=4), rates(100, schedule="wsd", decay_start=90)
    assert short[:16] == long[:16] == rates(50, schedule="constant")[:16]
    assert short[16] < 1.0


def test_what_is_due_when() -> None:
    assert [step for step in range(1, 11) if is_due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 0, 10)] == [10]
