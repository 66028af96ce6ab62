"""Curves on a disk that is full for a while, by the limit on the size of files, which refuses as a full disk does."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.monitor import event_file
from pretrain.monitor.tensorboard import Board
from tests.pretrain.monitor import events


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(board: Board, steps: range) -> None:
    for step in steps:
        board.scalar("train/loss", float(step), step)
        board.text("events/spike_report", f"at {step}", step)
    board.flush()


def test_curves_wait_for_room_and_none_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = Board(tmp_path, 0, 0)
    write(board, range(1, 4))
    (file,) = tmp_path.glob("events.*")
    with room(file.stat().st_size + 30):
        write(board, range(4, 7))
        write(board, range(7, 9))
        assert [step for step, _ in events.points(tmp_path, "train/loss")] == [1, 2, 3], "a part of a record"
        assert capsys.readouterr().out.count("warning: ") == 1
    write(board, range(9, 11))
    assert "written again" in capsys.readouterr().out
    board.close()
    assert events.points(tmp_path, "train/loss") == [(step, float(step)) for step in range(1, 11)]
    assert len(events.read(tmp_path).Tensors("events/spike_report/text_summary")) == 10


def test_what_waits_does_not_fill_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "MOST_KEPT", 500)
    board = Board(tmp_path, 0, 0)
    (file,) = tmp_path.glob("events.*")
    with room(file.stat().st_size):
        write(board, range(1, 4))
        write(board, range(4, 30))
    write(board, range(30, 32))
    board.close()
    assert [step for step, _ in events.points(tmp_path, "train/loss")] == [30, 31]
    assert "are given up" in capsys.readouterr().out
