"""The order of a training step, and nothing else."""

import time
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine, Measured
from pretrain.feed import Feed
from pretrain.monitor.metrics import Metrics, StepResult
from pretrain.rampup import batch_size
from pretrain.resilience.pulse import Pulse
from pretrain.resilience.wishes import Stop
from pretrain.state import TrainState


class Callback(Protocol):
    """Something that happens between steps."""

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Called on every rank after each completed step."""


class Outcome(Enum):
    """What becomes of a step; after ``REWOUND`` the run stands at an earlier one, and the step was none."""

    UPDATE = "the update was made"
    SKIP = "the update was skipped"
    REWOUND = "the run went back"


class Guard(Protocol):
    """Decides between a step's gradients and its update, on all ranks alike."""

    def learning_rate(self, state: TrainState) -> float:
        """Of the update that follows ``state``."""

    def judge(self, state: TrainState, measured: Measured, micro_batches: Sequence[MicroBatch], lr: float) -> Outcome:
        """What becomes of the step that follows ``state``, which changes where the run is rewound."""


def train(
    config: Config,
    state: TrainState,
    engine: Engine,
    feed: Feed,
    metrics: Metrics,
    guard: Guard,
    callbacks: list[Callback],
    pulse: Pulse,
) -> Stop:
    """Train from ``state`` to ``config.train.steps``, or to where it is told to stop; returns why it stopped early."""
    sequence = config.model.sequence_length
    metrics.start(state)
    while state.step < config.train.steps:
        started = time.perf_counter()
        batch = batch_size(state.consumed_samples, config.train)
        with metrics.phases.lap("data"):
            micro_batches = feed.fetch(state)
        pulse.begin_step(batch)
        with metrics.observe(state.step + 1), metrics.phases.lap("forward_backward"):
            loss_share = engine.forward_backward(micro_batches, state.step)
        measured = engine.measure(loss_share)
        lr = guard.learning_rate(state)
        outcome = guard.judge(state, measured, micro_batches, lr)
        if outcome is Outcome.REWOUND:
            continue
        with metrics.observe_update(), metrics.phases.lap("optimizer"):
            engine.step(lr) if outcome is Outcome.UPDATE else engine.skip()
        seconds = time.perf_counter() - started
        state.advance(samples=batch, tokens=batch * sequence, seconds=seconds)
        result = StepResult(measured.loss, measured.grad_norm, lr, pulse.end_step(seconds))
        for callback in (metrics, *callbacks):
            callback.after_step(state, result)
        if result.wishes.stop and state.step < config.train.steps:
            return result.wishes.stop
    return Stop.NO
