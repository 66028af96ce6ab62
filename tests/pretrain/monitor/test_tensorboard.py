from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.monitor.tensorboard import Board


def write(folder: Path, resumed_step: int, steps: range, value: float) -> None:
    board = Board(folder, resumed_step, global_rank=0)
    for step in steps:
        board.scalar("train/loss", value, step)
    board.close()


def test_a_resumed_curve_replaces_what_its_checkpoint_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 8), 1.0)
    write(tmp_path, 4, range(5, 10), 2.0)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(step, 1.0 if step <= 4 else 2.0) for step in range(1, 10)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    board = Board(tmp_path / "run", 0, global_rank=1)
    board.scalar("train/loss", 1.0, 1)
    board.text("run/config", "text", 1)
    board.flush()
    board.close()
    assert not (tmp_path / "run").exists()
