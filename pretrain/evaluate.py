"""Validation loss during a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.rampup import batch_sizes
from pretrain.resilience.pulse import Pulse
from pretrain.resilience.wishes import Stop
from pretrain.schedule import is_due
from pretrain.state import TrainState

_NAME = "validation"
"""What a run remembers of it: the newest step whose validation loss is known."""


@dataclass(frozen=True)
class HeldOut:
    """This rank's part of a data set's validation samples.

    Attributes:
        name: of the data set.
        weight: of the data set in the mixture.
        micro_batches: as many as every other data-parallel rank has.
    """

    name: str
    weight: float
    micro_batches: Sequence[MicroBatch]


class Validation:
    """The loss over the same held-out samples every ``validation.every`` steps, at the end, and when wished for.

    With several data sets each has a curve of its own, beside the mean by their weights.
    """

    def __init__(self, config: Config, engine: Engine, board: Board, pulse: Pulse, held_out: Sequence[HeldOut]) -> None:
        self._every = config.validation.every
        self._steps = config.train.steps
        self._engine = engine
        self._board = board
        self._pulse = pulse
        self._held_out = held_out
        # No part takes longer than a step, by which the watchdog judges.
        self._part = batch_sizes(config.train)[0] // (config.train.micro_batch * engine.place.dp_size)

    def make_up(self, state: TrainState) -> None:
        """Evaluate if the run stopped before it could, at the step that it goes on from."""
        known = state.callbacks.setdefault(_NAME, {"step": state.step})
        if known["step"] < state.step and is_due(state.step, self._every, self._steps):
            self._evaluate(state)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Evaluate when it is time."""
        if result.wishes.evaluate or is_due(state.step, self._every, self._steps):
            self._evaluate(state)

    def _evaluate(self, state: TrainState) -> None:
        """Leaves when the run is told to stop; at the last step it stops anyway."""
        last = state.step == self._steps
        losses = []
        for part in self._held_out:
            cut = list(_parts(part.micro_batches, self._part))
            loss = self._engine.evaluate_unless(cut, lambda: self._pulse.poll().stop != Stop.NO and not last)
            if loss is None:
                return
            losses.append(loss)
        self._write(state, losses)

    def _write(self, state: TrainState, losses: Sequence[float]) -> None:
        weights = [part.weight for part in self._held_out]
        mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        state.callbacks[_NAME] = {"step": state.step, "loss": mean}
        self._board.scalar("validation/loss", mean, state.step)
        self._board.scalars_by_tokens({"validation/loss_by_tokens": mean}, state.tokens, state.clock)
        said = ""
        if len(losses) > 1:
            for part, loss in zip(self._held_out, losses, strict=True):
                self._board.scalar(f"validation/loss/{part.name}", loss, state.step)
                said += f"  {part.name} {loss:.4f}"
        self._board.flush()  # a run that resumes from a checkpoint of this step does not repeat the point
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{self._steps}  validation loss {mean:.4f}{said}", flush=True)


def _parts(micro_batches: Sequence[MicroBatch], size: int) -> Iterator[Sequence[MicroBatch]]:
    return (micro_batches[first : first + size] for first in range(0, len(micro_batches), size))
