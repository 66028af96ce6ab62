"""What looks after one launch of a run, from its start to its end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from pretrain.config import Config
from pretrain.launch import Launch
from pretrain.loop import Callback
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.resilience import records
from pretrain.resilience.launches import LaunchRecord, current_job, require_progress
from pretrain.resilience.pulse import Pulse
from pretrain.resilience.signals import Signals
from pretrain.resilience.verdict import leave_verdict
from pretrain.resilience.watchdog import Watchdog
from pretrain.resilience.wishes import Stop, Wishes, WishFiles
from pretrain.state import TrainState


class Patiently:
    """A callback that may take longer than a step: one that waits for a file system."""

    def __init__(self, callback: Callback, watchdog: Watchdog) -> None:
        self._callback = callback
        self._watchdog = watchdog

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """The callback's."""
        with self._watchdog.patience():
            self._callback.after_step(state, result)


class Caretaker:
    """Signals, wishes, the watchdog and the launch's record, put together; a callback, the last one."""

    def __init__(self, config: Config, launch: Launch, signals: Signals, start_step: int) -> None:
        """Before process groups start.

        Raises:
            SharedError: the job has started the run again and again without progress.
        """
        require_progress(config.run.dir, start_step, current_job())
        self._steps = config.train.steps
        self._leads = launch.global_rank == 0
        self._record = LaunchRecord(config, launch, start_step) if self._leads else None
        self._files = WishFiles(config.run.dir, can_evaluate=config.validation.every > 0) if self._leads else None
        self._signals = signals
        self.hosts: list[str] = []
        """Of all global ranks, once they have met; on global rank 0."""
        self._watchdog = Watchdog(config.watchdog, launch.global_rank)
        self._first_step_at: float | None = None

    def patiently(self, callback: Callback) -> Callback:
        """The same callback, given time."""
        return Patiently(callback, self._watchdog)

    @contextmanager
    def look_after(self, state: TrainState, board: Board, place: Place) -> Iterator[Pulse]:
        """Signals and wishes are heard within; collective.

        An error within is the verdict of this launch as soon as it is known: what it still waits for, or what other
        ranks say because of it, must not make the job start again.
        """
        self._signals.arm(speaks=self._leads)
        pulse = Pulse(self._told, self._watchdog)
        self._tell_where(pulse.group, board, state.step)
        try:
            yield pulse
        except BaseException as error:
            leave_verdict(requeue=False, reason=f"{type(error).__name__}: {error}")
            self._watchdog.expect_anything()
            raise
        pulse.close()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """What was wished for is done now, unless it was a stop: then :meth:`end` follows. Samples are read next."""
        self._watchdog.expect_anything()
        self._first_step_at = self._first_step_at or time.time()
        if self._files is not None and result.wishes.any and not result.wishes.stop:
            self._files.done(result.wishes, state.step)

    def end(self, stop: Stop, state: TrainState) -> None:
        """The run has ended in order and its checkpoint is durable."""
        self._watchdog.close()
        if self._record is None or self._files is None:
            return
        reason = self._reason(stop)
        times = {"first_step": self._first_step_at, "signal": self._signals.received_at, "durable": time.time()}
        self._record.end(state.step, reason, times)
        if stop == Stop.SIGNAL:
            leave_verdict(requeue=True, reason=f"{reason}, stopped at step {state.step}")
        if stop != Stop.NO:
            print(f"step {state.step}/{self._steps}  stopped here: {reason}", flush=True)
        self._files.done(Wishes(stop, save=True, evaluate=False), state.step)
        if stop in (Stop.NO, Stop.WISH):
            self._files.forget()

    def _told(self) -> Wishes:
        wishes = self._files.look() if self._files is not None else Wishes()
        wishes.stop = max(wishes.stop, self._signals.stop)
        return wishes

    def _reason(self, stop: Stop) -> str:
        if stop in (Stop.NO, Stop.WISH):
            return "finished" if stop == Stop.NO else "told to stop by the file stop"
        return self._signals.name or "a signal to another rank"

    def _tell_where(self, group: Any, board: Board, step: int) -> None:
        """Make the launch's folder known to all ranks, and all ranks' hosts to its record; collective."""
        folder = [self._record.folder if self._record is not None else None]
        dist.broadcast_object_list(folder, src=0, group=group)
        self._watchdog.traces = folder[0]
        self.hosts = [""] * dist.get_world_size()
        dist.gather_object(records.host(), self.hosts if self._leads else None, dst=0, group=group)
        if self._record is not None:
            self._record.add_hosts(self.hosts)
            board.text("events/restart", self._record.text(), step)
