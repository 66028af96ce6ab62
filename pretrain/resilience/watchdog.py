"""Ends a process that hangs, so that its job can be started again, and leaves a trace of where it hung."""

import faulthandler
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pretrain.config import WatchdogSettings
from pretrain.resilience.verdict import REQUEUE_STATUS, leave_verdict

FIRST_STEPS = 3
"""So many steps are no measure: kernels are compiled, caches fill."""
WINDOW = 100
GRACE_SECONDS = 5.0
"""Between the trace and the end: the ranks hang together, and the first that ends takes the others with it."""
WRITE_SECONDS = 10.0
"""The file system may be what hangs: then the trace goes to standard error."""


class Watchdog:
    """A thread that watches this process's steps, or nothing where ``watchdog.factor`` is 0.

    A step may take ``factor`` times the median of the last ones, for each of its samples, but at least
    ``floor_seconds``; what is no step (loading, reading samples, saving, the first steps) may take
    ``patience_minutes``.
    """

    def __init__(self, settings: WatchdogSettings, global_rank: int, end: Callable[[int], object] = os._exit) -> None:
        """Begin to watch, with patience."""
        self.traces: Path | None = None
        """Folder for ``stacks-<global_rank>.txt``; until it is known, and when it cannot be written, standard error."""
        self._settings = settings
        self._global_rank = global_rank
        self._end = end
        self._seconds: deque[float] = deque(maxlen=WINDOW)  # a sample
        self._samples = 1
        self._steps = 0
        self._beat, self._limit = time.monotonic(), self._longest
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if settings.factor:
            self._thread.start()

    @property
    def limit(self) -> float:
        """Seconds that what is done now may take."""
        return self._limit

    @property
    def _longest(self) -> float:
        return 60 * self._settings.patience_minutes

    def expect_step(self, samples: int | None = None) -> None:
        """From now on, the time of a step of so many samples; left out, of as many as the last one."""
        self._samples = samples or self._samples
        if not self._seconds:
            self._set(self._longest)
        else:
            usual = self._samples * statistics.median(self._seconds)
            self._set(max(self._settings.floor_seconds, self._settings.factor * usual))

    def expect_anything(self) -> None:
        """From now on, patience."""
        self._set(self._longest)

    def step_ended(self, seconds: float) -> None:
        """A step took so long; what follows it should take no longer."""
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self._seconds.append(seconds / self._samples)
        self.expect_step()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """What is done within may take its time."""
        self.expect_anything()
        yield
        self.expect_step()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _set(self, limit: float) -> None:
        # One assignment each, read by the thread: a new beat with the old limit for an instant does no harm.
        self._beat, self._limit = time.monotonic(), limit

    def _watch(self) -> None:
        while True:
            limit = self._limit
            waited = time.monotonic() - self._beat
            if waited > limit:
                break
            if self._closed.wait(min(limit - waited + 0.01, math.ceil(self._settings.floor_seconds / 4))):
                return
        reason = (
            f"global rank {self._global_rank} hangs: nothing for {waited:.0f} s (limit {limit:.0f} s) "
            f"after {self._steps} steps of this launch"
        )
        leave_verdict(requeue=True, reason=reason)
        self._leave_trace(reason)
        time.sleep(GRACE_SECONDS)
        self._end(REQUEUE_STATUS)

    def _leave_trace(self, reason: str) -> None:
        path = self.traces / f"stacks-{self._global_rank}.txt" if self.traces else None
        if path is not None:
            writer = threading.Thread(target=_write_trace, args=(path, reason), daemon=True)
            writer.start()
            writer.join(WRITE_SECONDS)
            if path.exists() and not writer.is_alive():
                print(f"{reason}; stacks of all threads in {path}", file=sys.stderr, flush=True)
                return
        _dump(sys.__stderr__ or sys.stderr, reason)


def _write_trace(path: Path, reason: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        _dump(file, reason)


def _dump(file: TextIO, reason: str) -> None:
    print(reason, file=file, flush=True)
    faulthandler.dump_traceback(file, all_threads=True)
    file.flush()
