"""Time of this rank's own work, on the clock of the device that does it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds a lap, since they were last taken.

    A GPU works behind the program: there the laps are measured by events in its queue, and nothing waits for them
    before they are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Measure what is done within."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - started)

    def laps(self) -> list[float]:
        """Seconds of each lap since the last call; waits for the device to end the last one."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += [begin.elapsed_time(end) / 1000 for begin, end in self._events]
            self._events.clear()
        seconds, self._seconds = self._seconds, []
        return seconds

    def take(self) -> float:
        """Mean of :meth:`laps`, 0 without any."""
        laps = self.laps()
        return sum(laps) / len(laps) if laps else 0.0
