"""When a run saves itself."""

import math
from typing import Any

from pretrain.checkpoint import saving, store
from pretrain.config import Config
from pretrain.datasets import Facts
from pretrain.engine import Engine
from pretrain.errors import SharedError
from pretrain.monitor.metrics import StepResult
from pretrain.provenance import git_revision, versions
from pretrain.schedule import is_due
from pretrain.state import TrainState


class Saver:
    """Saves every ``checkpoint.every`` steps, after the last step, when wished for and before a stop."""

    def __init__(self, config: Config, facts: Facts, engine: Engine, vocab_size: int) -> None:
        self._config = config
        self._engine = engine
        self._vocab_size = vocab_size
        self._directory = store.checkpoint_folder(config.run.dir)
        self._facts = _facts(config, facts, vocab_size) if engine.place.global_rank == 0 else {}

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Save when it is time, but never after a step that was not finite: such weights may be beyond repair.

        Raises:
            SharedError: the last step was not finite.
        """
        steps = self._config.train.steps
        wished = result.wishes.save or bool(result.wishes.stop)
        if not (wished or is_due(state.step, self._config.checkpoint.every, steps)):
            return
        if not math.isfinite(result.grad_norm):
            message = f"the gradient of step {state.step} was not finite, so it was not saved"
            if state.step == steps:
                raise SharedError(f"{message}; lower optimizer.lr and start again from {store.newest(self._directory)}")
            if self._engine.place.global_rank == 0:
                print(f"warning: {message}", flush=True)
            return
        record = self._facts | {"state": state.to_dict()}
        saving.save(self._engine, self._directory, state.step, self._vocab_size, record)
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{steps}  saved to {self._directory}", flush=True)


def _facts(config: Config, facts: Facts, vocab_size: int) -> dict[str, Any]:
    """What every checkpoint of a run records of it; global rank 0 alone writes it."""
    return {
        "format": store.FORMAT,
        "config": config.model_dump(mode="json"),
        "data_fingerprint": facts.fingerprint,
        "datasets": facts.fingerprints,
        "tokenizer_sha256": facts.tokenizer_sha256,
        "vocab_size": vocab_size,
        "versions": versions(),
        "git_revision": git_revision(),
    }
