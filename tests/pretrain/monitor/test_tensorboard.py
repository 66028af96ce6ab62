from pathlib import Path

from pretrain.monitor.tags import BY_TOKENS
from pretrain.monitor.tensorboard import Board
from tests.pretrain.monitor import events


def write(folder: Path, resumed_step: int, steps: range, value: float) -> None:
    """A launch with 100 tokens a step."""
    board = Board(folder, resumed_step, 0, 100 * resumed_step)
    for step in steps:
        board.scalars({"train/loss": value, "train/lr": 2 * value}, step)
        board.scalars_by_tokens({"train/loss_by_tokens": value}, 100 * step, at=1000.0 + step)
    board.close()


def test_a_resumed_curve_replaces_what_its_checkpoint_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8), 1.0)
    write(tmp_path, 4, range(5, 10), 2.0)
    expected = [(step, 1.0 if step <= 4 else 2.0) for step in range(1, 10)]
    assert events.points(tmp_path, "train/loss") == expected
    assert events.points(tmp_path, "train/lr") == [(step, 2 * value) for step, value in expected]
    by_tokens = [(100 * step, value) for step, value in expected]
    assert events.points(tmp_path / BY_TOKENS, "train/loss_by_tokens") == by_tokens


def test_files_of_one_second_are_read_in_their_order(tmp_path: Path) -> None:
    for begin in range(12):
        write(tmp_path, begin, range(begin + 1, 14), float(begin))
    expected = [(step, float(min(step - 1, 11))) for step in range(1, 14)]
    assert events.points(tmp_path, "train/loss") == expected


def test_a_run_that_goes_back_replaces_what_came_after(tmp_path: Path) -> None:
    board = Board(tmp_path, 0, 0)
    for steps, value in ((range(1, 7), 1.0), (range(4, 9), 2.0)):
        if steps.start > 1:
            board.rewind(steps.start - 1, 100 * (steps.start - 1))
        for step in steps:
            board.scalar("train/loss", value, step)
            board.scalars_by_tokens({"train/loss_by_tokens": value}, 100 * step, at=float(step))
    board.close()
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 9)]
    assert events.points(tmp_path, "train/loss") == expected
    by_tokens = events.points(tmp_path / BY_TOKENS, "train/loss_by_tokens")
    assert by_tokens == [(100 * step, value) for step, value in expected]


def test_a_clock_that_was_set_is_the_points_time(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 3), 1.0)
    points = events.read(tmp_path / BY_TOKENS).Scalars("train/loss_by_tokens")
    assert [point.wall_time for point in points] == [1001.0, 1002.0]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    board = Board(tmp_path / "run", 0, global_rank=1)
    board.scalar("train/loss", 1.0, 1)
    board.scalars_by_tokens({"train/loss_by_tokens": 1.0}, 100, at=0.0)
    board.text("system/config", "text", 1)
    board.settings({"optimizer.lr": 1.0}, ["optimizer.lr"], ["train/loss"])
    board.flush()
    board.close()
    assert not (tmp_path / "run").exists()
