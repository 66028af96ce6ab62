"""How all ranks come to the same decision at the same step, without waiting for one another or for the device.

At every step boundary each rank posts what it was told since, as one small asynchronous all-reduce (maximum) between
CPUs, and reads the sum of what was posted at the boundary before: a whole step has passed since, so it is there.
"""

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from pretrain.resilience.watchdog import Watchdog
from pretrain.resilience.wishes import Wishes

_PATIENCE = datetime.timedelta(minutes=60)
"""How far ranks may lie apart; the watchdog speaks first."""


class Pulse:
    """The agreement between ranks.

    Attributes:
        wishes: what all ranks have agreed to do at this step boundary. An evaluation may add to it while it runs.
    """

    def __init__(self, told: Callable[[], Wishes], watchdog: Watchdog) -> None:
        """Make a group of all ranks, on the CPU, and post for the first time; collective.

        Args:
            told: what this process was told since it was last asked.
            watchdog: hears every beat.
        """
        self.wishes = Wishes()
        self._told = told
        self._watchdog = watchdog
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._posted = torch.zeros(0)
        self._work: Any = None
        self._post()

    def begin_step(self, samples: int) -> None:
        """So many samples are there: what follows should take as long as as many did before."""
        self._watchdog.expect_step(samples)

    def patience(self) -> AbstractContextManager[None]:
        """What is done within may take longer than a step."""
        return self._watchdog.patience()

    def end_step(self, seconds: float) -> Wishes:
        """At the boundary after a step of so many seconds: what all ranks do now; collective."""
        self._watchdog.step_ended(seconds)
        self.wishes = Wishes()
        self._exchange()
        return self.wishes

    def poll(self) -> Wishes:
        """Between parts of an evaluation, none longer than a step: what came in meanwhile; collective."""
        self._watchdog.expect_step()
        self._exchange()
        return self.wishes

    def close(self) -> None:
        """Wait for what is still under way; collective."""
        self._work.wait()

    def _exchange(self) -> None:
        self._work.wait()
        self.wishes.add(self._posted.tolist())
        self._post()

    def _post(self) -> None:
        self._posted = torch.tensor(self._told().numbers(), dtype=torch.int32)
        self._work = dist.all_reduce(self._posted, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
