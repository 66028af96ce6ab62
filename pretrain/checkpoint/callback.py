"""When a run saves itself."""

from pathlib import Path

from pretrain.checkpoint import saving
from pretrain.config import Config
from pretrain.data.manifest import Manifest
from pretrain.engine import Engine
from pretrain.monitor.metrics import StepResult
from pretrain.provenance import git_revision, versions
from pretrain.state import TrainState


class Saver:
    """Saves every ``checkpoint.every`` steps and after the last step."""

    def __init__(self, config: Config, manifest: Manifest, engine: Engine, vocab_size: int) -> None:
        self._config = config
        self._engine = engine
        self._vocab_size = vocab_size
        self._directory = checkpoint_directory(config)
        self._facts = {
            "format": 1,
            "config": config.model_dump(mode="json"),
            "data_fingerprint": manifest.fingerprint,
            "vocab_size": vocab_size,
            "versions": versions(),
            "git_revision": git_revision(),
        }

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Save when it is time."""
        every = self._config.checkpoint.every
        if state.step != self._config.train.steps and not (every and state.step % every == 0):
            return
        record = self._facts | {"state": state.to_dict()}
        saving.save(self._engine, self._directory, state.step, self._vocab_size, record)
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{self._config.train.steps}  saved to {self._directory}", flush=True)


def checkpoint_directory(config: Config) -> Path:
    """Folder of a run's checkpoints."""
    return config.run.dir / "checkpoints"
