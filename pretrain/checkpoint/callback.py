"""When a run saves itself, and what it does when that fails."""

import datetime
import math
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pretrain.checkpoint import store
from pretrain.checkpoint.retention import remove_expendable
from pretrain.checkpoint.saving import Background, job_of
from pretrain.checkpoint.writing import Job, write
from pretrain.config import Config
from pretrain.datasets import Facts
from pretrain.engine import Engine
from pretrain.errors import SharedError
from pretrain.monitor.metrics import StepResult
from pretrain.parallel import Place
from pretrain.provenance import git_revision, versions
from pretrain.schedule import is_due
from pretrain.state import TrainState

_PATIENCE = datetime.timedelta(minutes=30)
"""How much longer one rank may take for its file than another; a rank that died is noticed at once."""


def checkpoint_group() -> dist.ProcessGroup:
    """A group of all ranks, on the CPU, for saving and loading alone; collective."""
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


class Saver:
    """Saves every ``checkpoint.every`` steps, after the last step, when wished for and before a stop.

    As a context, it waits for what it began.
    """

    def __init__(self, config: Config, facts: Facts, engine: Engine, vocab_size: int, group: dist.ProcessGroup) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._engine = engine
        self._vocab_size = vocab_size
        self._group = group
        self._directory = store.checkpoint_folder(config.run.dir)
        self._background = Background(group, self._tell)
        self._last_fault: str | None = None
        self._leads = engine.place.global_rank == 0
        self._facts = _facts(config, facts, vocab_size, engine.place) if self._leads else {}

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Save when it is time, but never after a step that was not finite: such weights may be beyond repair.

        Raises:
            SharedError: the last step was not finite, or a save failed and ``checkpoint.on_failed_save`` is ``stop``.
        """
        steps = self._config.train.steps
        wished = result.wishes.save or bool(result.wishes.stop)
        if self._settings.on_failed_save == "stop" and is_due(state.step, self._config.logging.every, steps):
            self._look_after_the_last()
        if not (wished or is_due(state.step, self._settings.every, steps)):
            return
        self._wait()
        if not math.isfinite(result.grad_norm):
            message = f"the gradient of step {state.step} was not finite, so it was not saved"
            if state.step == steps:
                raise SharedError(f"{message}; lower optimizer.lr and start again from {store.newest(self._directory)}")
            if self._leads:
                print(f"warning: {message}", flush=True)
            return
        record = self._facts | {"state": state.to_dict()}
        job = job_of(self._engine, self._directory, state.step, self._vocab_size, record)
        if self._settings.asynchronous:
            self._background.begin(job)
            if wished:  # whoever wished for it waits for it
                self._wait()
            return
        fault = write(job, self._group)
        self._tell(job, fault)
        self._judge(fault)

    def settle(self) -> None:
        """Wait for a save that is under way; SharedError when it failed and the settings say ``stop``."""
        self._wait()

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            SharedError: it failed, so the end of the run is not saved, whatever the settings say.
        """
        self._wait()
        if self._last_fault:
            raise SharedError(f"{self._last_fault}; make room and start again from {store.newest(self._directory)}")

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever ended the training, a save that began may still become durable."""
        self._background.join()

    def _look_after_the_last(self) -> None:
        """Find out whether a save ended badly, once it ended on all ranks; collective."""
        if self._background.is_idle:
            return
        ended = torch.tensor(int(self._background.is_done), device=self._engine.place.device)
        dist.all_reduce(ended, op=dist.ReduceOp.MIN)
        if ended:
            self._wait()

    def _wait(self) -> None:
        if not self._background.is_idle:
            self._judge(self._background.wait())

    def _judge(self, fault: str | None) -> None:
        self._last_fault = fault
        if fault and self._settings.on_failed_save == "stop":
            raise SharedError(f"{fault}; make room, or let training go on by checkpoint.on_failed_save=go_on")

    def _tell(self, job: Job, fault: str | None) -> None:
        """On global rank 0, perhaps in the thread that wrote: what became of a save."""
        if not self._leads:
            return
        if fault is None:
            print(f"step {job.step}/{self._config.train.steps}  saved to {job.directory}", flush=True)
            try:
                remove_expendable(job.directory, self._settings)
            except OSError as error:
                print(f"warning: an old checkpoint in {job.directory} cannot be removed: {error.strerror}", flush=True)
        elif self._settings.on_failed_save == "go_on":
            print(f"warning: {fault}; training goes on", flush=True)


def _facts(config: Config, facts: Facts, vocab_size: int, place: Place) -> dict[str, Any]:
    """What every checkpoint of a run records of it; global rank 0 alone writes it."""
    return {
        "config": config.model_dump(mode="json"),
        "dp_size": place.dp_size,
        "data_fingerprint": facts.fingerprint,
        "datasets": facts.fingerprints,
        "tokenizer_sha256": facts.tokenizer_sha256,
        "vocab_size": vocab_size,
        "versions": versions(),
        "git_revision": git_revision(),
    }
