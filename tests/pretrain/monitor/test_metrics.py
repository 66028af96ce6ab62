import math

import pytest

from pretrain.errors import SharedError
from pretrain.monitor.metrics import steps_not_finite


def test_finite_steps_pass() -> None:
    assert steps_not_finite(5, [1.0, 2.0], [0.1, 0.2]) == []


def test_some_broken_steps_are_listed() -> None:
    assert steps_not_finite(5, [1.0, math.nan, 2.0, 3.0], [0.1, math.inf, 0.2, math.inf]) == [6, 8]


def test_a_window_that_is_wholly_broken_ends_the_run() -> None:
    with pytest.raises(SharedError, match="every step from 5 to 6"):
        steps_not_finite(5, [math.nan, 1.0], [1.0, math.inf])
