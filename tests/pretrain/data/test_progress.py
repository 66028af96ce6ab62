import json

import pytest

from pretrain.data.mixture import Share, Stage
from pretrain.data.progress import DataProgress
from pretrain.state import TrainState


def taken(progress: DataProgress, count: int) -> list[int]:
    return progress.draws(0, count).tolist()


def test_without_windows_draws_are_samples() -> None:
    assert DataProgress().draws(5, 3).tolist() == [5, 6, 7]


def test_skipped_draws_are_never_taken_and_all_others_once() -> None:
    progress = DataProgress()
    progress.skip(10, 5, consumed_samples=8)
    progress.skip(30, 1, consumed_samples=9)
    progress.skip(16, 2, consumed_samples=9)
    skipped = {*range(10, 15), 30, 16, 17}
    assert taken(progress, 40) == [draw for draw in range(48) if draw not in skipped]
    for consumed in range(40):
        assert progress.draws(consumed, 7).tolist() == taken(progress, consumed + 7)[consumed:]
        assert progress.next_draw(consumed) == taken(progress, consumed + 1)[-1]


@pytest.mark.parametrize(
    ("windows", "merged"),
    [
        ([(10, 5), (15, 5)], [(10, 10)]),
        ([(10, 5), (12, 1)], [(10, 5)]),
        ([(12, 5), (10, 5)], [(10, 7)]),
        ([(20, 2), (10, 2), (11, 15)], [(10, 16)]),
        ([(10, 2), (13, 2)], [(10, 2), (13, 2)]),
    ],
)
def test_windows_that_touch_become_one(windows: list[tuple[int, int]], merged: list[tuple[int, int]]) -> None:
    progress = DataProgress()
    for first, count in windows:
        progress.skip(first, count, consumed_samples=0)
    assert progress.skipped == merged
    gone = {draw for first, count in windows for draw in range(first, first + count)}
    assert taken(progress, 30) == [draw for draw in range(100) if draw not in gone][:30]


def test_a_window_in_the_past_is_refused() -> None:
    progress = DataProgress()
    progress.skip(8, 4, consumed_samples=8)
    with pytest.raises(ValueError, match="draw 13 lies in the past: 13 was taken already"):
        progress.skip(13, 2, consumed_samples=10)
    with pytest.raises(ValueError, match="a window of 0 draws"):
        progress.skip(20, 0, consumed_samples=10)
    progress.skip(14, 2, consumed_samples=10)
    assert progress.draws(8, 4).tolist() == [12, 13, 16, 17]


def test_the_state_survives_json() -> None:
    shares = (Share("a", "", 10, 0.1, None, 3), Share("b", "b", 20, 0.7, 2, 0))
    data = DataProgress([Stage(0, shares), Stage(17, shares[:1])], [(5, 2)], bad_samples=3)
    state = TrainState(step=3, consumed_samples=24, tokens=768, train_seconds=1.5, data=data)
    assert TrainState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
