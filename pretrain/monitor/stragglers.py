"""Ranks that keep the others waiting."""

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from pretrain.config import Config
from pretrain.engine import Engine
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.schedule import is_log_step
from pretrain.state import TrainState

SLOW_RATIO = 1.5
SLOW_SECONDS = 0.05
"""Below this difference it is the noise of short steps."""


class Stragglers:
    """On log steps, compares the ranks' own time a step, that of forward and backward without the wait for others.

    Ranks of one tensor- and pipeline-parallel group wait for one another within it: a slow one makes its group slow.
    """

    def __init__(self, config: Config, engine: Engine, board: Board, hosts: Sequence[str]) -> None:
        """Begin; ``hosts`` are those of all global ranks, needed on global rank 0 alone."""
        self._config = config
        self._engine = engine
        self._board = board
        self._hosts = hosts
        self._named: set[int] = set()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Gather; collective on log steps. A slow rank is named once, and again after it has recovered."""
        if not is_log_step(state.step, self._config):
            return
        place = self._engine.place
        seconds = torch.zeros(place.world_size, dtype=torch.float64, device=place.device)
        seconds[place.global_rank] = self._engine.stopwatch.take()
        dist.all_reduce(seconds)
        taken = seconds.tolist()
        self._board.scalar("throughput/slowest_rank", max(taken) / statistics.median_low(taken), state.step)
        slow = slow_ranks(taken)
        if place.global_rank == 0:
            for global_rank in sorted(set(slow) - self._named):
                print(f"slow: {describe(global_rank, taken, self._hosts[global_rank])}", flush=True)
        self._named = set(slow)


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """Global ranks whose work takes far longer than the median's, slowest first; ``seconds`` of all, a step."""
    median = statistics.median_low(seconds)
    slow = [i for i, own in enumerate(seconds) if own > SLOW_RATIO * median and own - median > SLOW_SECONDS]
    return sorted(slow, key=lambda i: -seconds[i])


def describe(global_rank: int, seconds: Sequence[float], host: str) -> str:
    """A slow rank in words."""
    own, median = seconds[global_rank], statistics.median_low(seconds)
    return f"global rank {global_rank} on {host}: {own:.3f} s of work a step, {own / median:.1f} times the median rank"
