"""Something that may fail on one rank alone, done so that all ranks go on or none does."""

import datetime
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from pretrain.errors import SharedError, UserError

T = TypeVar("T")


def do_together(together: "Together | None", action: Callable[[], T]) -> T:
    """The action's result; where ``together`` is given, collective and as :meth:`Together.do` says."""
    return action() if together is None else together.do(action)


class Together:
    """Ends all ranks with the same line when one of them meets a UserError.

    Without it the others would wait in their next collective for a rank that has ended, up to its timeout.
    """

    def __init__(self, patience_seconds: float) -> None:
        """Make a group of all ranks, on the CPU; collective.

        Args:
            patience_seconds: how long one rank may take longer than another before it fails.
        """
        # The slowest rank must be able to tell of its failure before the others give up waiting for it.
        timeout = datetime.timedelta(seconds=patience_seconds + 300)
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def do(self, action: Callable[[], T]) -> T:
        """The action's result; collective.

        Raises:
            SharedError: on all ranks, when the action raised a UserError on any; with the message of the lowest one.
        """
        fault, results = None, list[T]()
        try:
            results.append(action())
        except UserError as error:
            fault = str(error)
        failed = torch.tensor(fault is not None, dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed:
            faults: list[str | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(faults, fault, group=self._group)
            raise SharedError(next(text for text in faults if text is not None))
        return results[0]
