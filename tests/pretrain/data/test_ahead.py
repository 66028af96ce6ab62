import threading

import numpy as np
import pytest

from pretrain.data.ahead import Draws, ReadAhead
from pretrain.data.reader import Rows


class Source:
    """Rows that repeat their draws, and a record of what was read where."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.threads: set[threading.Thread] = set()
        self.done = threading.Semaphore(0)

    def __call__(self, draws: Draws) -> Rows:
        self.threads.add(threading.current_thread())
        self.read.append(draws.tolist())
        if draws[0] == 13:
            raise ConnectionError("no draw 13")
        self.done.release()
        return Rows(draws[:, None], np.ones(len(draws), dtype=np.bool_))


def step(number: int) -> Draws:
    return np.arange(2 * number, 2 * number + 2)


def test_the_next_rows_are_read_before_they_are_asked_for() -> None:
    source = Source()
    with ReadAhead(source) as ahead:
        assert ahead.take(step(0), step(1)).tokens.tolist() == [[0], [1]]
        assert source.done.acquire(timeout=10)
        assert source.done.acquire(timeout=10)
        assert source.read == [[0, 1], [2, 3]]
        assert ahead.take(step(1), None).tokens.tolist() == [[2], [3]]
        assert source.read == [[0, 1], [2, 3]]
    (thread,) = source.threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_other_draws_than_those_announced_are_read_anew() -> None:
    source = Source()
    with ReadAhead(source) as ahead:
        ahead.take(step(0), step(1))
        assert ahead.take(step(4), step(5)).tokens.tolist() == [[8], [9]]
        assert ahead.take(step(5), None).tokens.tolist() == [[10], [11]]


def test_what_the_thread_raises_is_raised_where_the_rows_are_wanted() -> None:
    source = Source()
    with ReadAhead(source) as ahead:
        ahead.take(step(0), np.array([13, 14]))
        with pytest.raises(ConnectionError, match="no draw 13"):
            ahead.take(np.array([13, 14]), None)
    (thread,) = source.threads
    assert not thread.is_alive()


def test_the_thread_ends_when_the_run_fails() -> None:
    source = Source()

    def fail() -> None:
        with ReadAhead(source) as ahead:
            ahead.take(step(0), step(1))
            raise RuntimeError("elsewhere")

    with pytest.raises(RuntimeError, match="elsewhere"):
        fail()
    assert not next(iter(source.threads)).is_alive()
