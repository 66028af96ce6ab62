"""When a run saves itself."""

import math

from pretrain.checkpoint import saving, store
from pretrain.config import Config
from pretrain.data.manifest import Manifest
from pretrain.engine import Engine
from pretrain.errors import SharedError
from pretrain.monitor.metrics import StepResult
from pretrain.provenance import git_revision, versions
from pretrain.state import TrainState


class Saver:
    """Saves every ``checkpoint.every`` steps and after the last step."""

    def __init__(self, config: Config, manifest: Manifest, engine: Engine, vocab_size: int) -> None:
        self._config = config
        self._engine = engine
        self._vocab_size = vocab_size
        self._directory = store.checkpoint_folder(config.run.dir)
        self._facts = {
            "format": 1,
            "config": config.model_dump(mode="json"),
            "data_fingerprint": manifest.fingerprint,
            "vocab_size": vocab_size,
            "versions": versions(),
            "git_revision": git_revision(),
        }

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Save when it is time, but never after a step that was not finite: such weights may be beyond repair.

        Raises:
            SharedError: the last step was not finite.
        """
        every, last = self._config.checkpoint.every, state.step == self._config.train.steps
        if not last and not (every and state.step % every == 0):
            return
        if not math.isfinite(result.grad_norm):
            message = f"the gradient of step {state.step} was not finite, so it was not saved"
            if last:
                raise SharedError(f"{message}; lower optimizer.lr and start again from {store.newest(self._directory)}")
            if self._engine.place.global_rank == 0:
                print(f"warning: {message}", flush=True)
            return
        record = self._facts | {"state": state.to_dict()}
        saving.save(self._engine, self._directory, state.step, self._vocab_size, record)
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{self._config.train.steps}  saved to {self._directory}", flush=True)
