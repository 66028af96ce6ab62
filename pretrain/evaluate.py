"""Validation loss during a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.schedule import is_due
from pretrain.state import TrainState


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
    """The loss over the same held-out samples every ``validation.every`` steps and at the end.

    With several data sets each has a curve of its own, beside the mean by their weights.
    """

    def __init__(self, config: Config, engine: Engine, board: Board, held_out: Sequence[HeldOut]) -> None:
        self._every = config.validation.every
        self._steps = config.train.steps
        self._engine = engine
        self._board = board
        self._held_out = held_out

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Evaluate when it is time."""
        if not is_due(state.step, self._every, self._steps):
            return
        losses = [self._engine.evaluate(part.micro_batches) for part in self._held_out]
        weights = [part.weight for part in self._held_out]
        mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        state.callbacks["validation"] = {"step": state.step, "loss": mean}
        self._board.scalar("validation/loss", mean, state.step)
        said = ""
        if len(losses) > 1:
            for part, loss in zip(self._held_out, losses, strict=True):
                self._board.scalar(f"validation/loss/{part.name}", loss, state.step)
                said += f"  {part.name} {loss:.4f}"
        self._board.flush()  # a run that resumes from a checkpoint of this step does not repeat the point
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{self._steps}  validation loss {mean:.4f}{said}", flush=True)
