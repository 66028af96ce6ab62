"""The order of a training step, and nothing else."""

import time
from typing import Protocol

from pretrain.config import Config
from pretrain.engine import Engine
from pretrain.feed import Feed
from pretrain.monitor.metrics import Metrics, StepResult
from pretrain.resilience.pulse import Pulse
from pretrain.resilience.wishes import Stop
from pretrain.schedule import learning_rate
from pretrain.state import TrainState


class Callback(Protocol):
    """Something that happens between steps."""

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Called on every rank after each completed step."""


def train(
    config: Config,
    state: TrainState,
    engine: Engine,
    feed: Feed,
    metrics: Metrics,
    callbacks: list[Callback],
    pulse: Pulse,
) -> Stop:
    """Train from ``state`` to ``config.train.steps``, or to where it is told to stop; returns why it stopped early."""
    batch, sequence = config.train.global_batch, config.model.sequence_length
    metrics.start(state)
    while state.step < config.train.steps:
        started = time.perf_counter()
        with metrics.phases.lap("data"):
            micro_batches = feed.fetch(state)
        pulse.begin_step()
        with metrics.observe(state.step + 1), metrics.phases.lap("forward_backward"):
            loss_share = engine.forward_backward(micro_batches, state.step)
        lr = learning_rate(state.step, config.train.steps, config.optimizer)
        with metrics.observe_update(), metrics.phases.lap("optimizer"):
            engine.step(lr)
        seconds = time.perf_counter() - started
        state.advance(samples=batch, tokens=batch * sequence, seconds=seconds)
        result = StepResult(loss_share, engine.grad_norm(), lr, pulse.end_step(seconds))
        for callback in (metrics, *callbacks):
            callback.after_step(state, result)
        if result.wishes.stop and state.step < config.train.steps:
            return result.wishes.stop
    return Stop.NO
