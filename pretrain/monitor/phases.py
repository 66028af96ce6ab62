"""Where the time of this rank goes."""

from contextlib import AbstractContextManager

import torch

from pretrain.monitor.stopwatch import Stopwatch

ON_DEVICE = ("forward_backward", "optimizer")
ON_HOST = ("data", "validation", "checkpoint")


class Phases:
    """A stopwatch for each phase of a step, and for what happens between steps.

    On a GPU the passes and the update are measured in its own queue, so nothing waits before :meth:`take`; the rest is
    time in which the program does nothing else.
    """

    def __init__(self, device: torch.device) -> None:
        host = torch.device("cpu")
        self._watches = {name: Stopwatch(device) for name in ON_DEVICE} | {name: Stopwatch(host) for name in ON_HOST}

    def lap(self, phase: str) -> AbstractContextManager[None]:
        """Measure what is done within as part of ``phase``."""
        return self._watches[phase].lap()

    def take(self, steps: int) -> dict[str, float]:
        """Phase -> seconds, of each of the last ``steps`` steps; phases that did not occur are left out."""
        laps = {phase: watch.laps() for phase, watch in self._watches.items()}
        return {phase: sum(seconds) / steps for phase, seconds in laps.items() if seconds}
