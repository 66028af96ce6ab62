"""Validation loss during a run."""

from collections.abc import Sequence

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.schedule import is_due
from pretrain.state import TrainState


class Validation:
    """The loss over the same held-out samples every ``validation.every`` steps and at the end."""

    def __init__(self, config: Config, engine: Engine, board: Board, micro_batches: Sequence[MicroBatch]) -> None:
        self._every = config.validation.every
        self._steps = config.train.steps
        self._engine = engine
        self._board = board
        self._micro_batches = micro_batches

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Evaluate when it is time."""
        if not is_due(state.step, self._every, self._steps):
            return
        loss = self._engine.evaluate(self._micro_batches)
        self._board.scalar("validation/loss", loss, state.step)
        self._board.flush()  # a run that resumes from a checkpoint of this step does not repeat the point
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{self._steps}  validation loss {loss:.4f}", flush=True)
