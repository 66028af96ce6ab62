"""Back to a checkpoint from before a spike, in the running processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain.checkpoint import store
from pretrain.checkpoint.callback import Saver
from pretrain.checkpoint.files import DamageError
from pretrain.checkpoint.loading import load
from pretrain.config import Config
from pretrain.engine import Engine
from pretrain.errors import SharedError, UserError
from pretrain.rampup import consumed_before, samples_of
from pretrain.recovery.memory import Rollback
from pretrain.run_data import RunData
from pretrain.state import TrainState

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A checkpoint that the run could go back to, and its record."""

    checkpoint: Path
    record: dict[str, Any]

    @property
    def state(self) -> TrainState:
        """Where it stands."""
        return TrainState.from_dict(self.record["state"])


class GoingBack:
    """Finds checkpoints from before a spike and puts the run there."""

    def __init__(
        self, config: Config, engine: Engine, saver: Saver, vocab_size: int, group: dist.ProcessGroup, data: RunData
    ) -> None:
        """Begin; ``group`` is that of saving and loading."""
        self._config, self._engine, self._saver, self._data = config, engine, saver, data
        self._vocab_size, self._group = vocab_size, group
        self._folder = store.checkpoint_folder(config.run.dir)

    def targets(self, onset: int, state: TrainState) -> list[Target]:
        """The checkpoints from before step ``onset``, the newest first; waits for a save under way. Collective.

        Those of another mixture are none: their data sets are not open.
        """
        self._saver.settle()
        return self._by_leader(lambda: self._find(onset, state))

    def go(self, targets: Sequence[Target], state: TrainState, onset: int) -> Rollback:
        """Load the first sound one of ``targets``, and have the samples of the spike never taken; collective.

        Args:
            state: before the spike's step; receives where the run stands now.

        Raises:
            SharedError: none is sound, or the data do not last.
        """
        step = state.step + 1
        self._engine.skip()
        target = self._load(targets)
        now = target.state
        now.data.skipped = list(state.data.skipped)
        first, count = window(self._config, state, now, onset)
        now.data.skip(first, count, now.consumed_samples)
        try:
            self._data.go_on(self._config, now, target.checkpoint, target.record, self._engine.place.dp_size)
        except UserError as error:
            raise SharedError(f"the run cannot go on behind the samples of the spike at step {step}: {error}") from None
        self._by_leader(lambda: self._remove_behind(now.step))
        state.become(now)
        return Rollback(at=step, to=now.step, first=first, count=count)

    def _find(self, onset: int, state: TrainState) -> list[Target]:
        found = []
        for checkpoint in store.checkpoints(self._folder):
            if store.step_of(checkpoint) >= onset:
                continue
            try:
                target = Target(checkpoint, store.read_record(checkpoint))
            except UserError:  # whoever goes on from the run's checkpoints is told of it
                continue
            if target.state.data.stages == state.data.stages:
                found.append(target)
        return found

    def _load(self, targets: Sequence[Target]) -> Target:
        for target in targets:
            try:
                load(self._engine, target.checkpoint, self._vocab_size, target.record, self._group)
                return target
            except DamageError as error:
                if self._engine.place.global_rank == 0:
                    print(f"warning: {error}; the one before is taken", flush=True)
        raise SharedError(f"no checkpoint in {self._folder} is sound; restore one and start again")

    def _remove_behind(self, step: int) -> None:
        """Checkpoints from within the spike: a restart would take the newest one."""
        for checkpoint in store.checkpoints(self._folder):
            if store.step_of(checkpoint) > step:
                store.remove(checkpoint)

    def _by_leader(self, action: Callable[[], T]) -> T:
        """What the action gives on global rank 0, which alone does it; SharedError on all ranks when it fails."""
        box: list[Any] = [None, None]
        if self._engine.place.global_rank == 0:
            try:
                box[0] = action()
            except OSError as error:
                box[1] = f"{self._folder}: {error.strerror}"
        dist.broadcast_object_list(box, src=0, group=self._group)
        if box[1] is not None:
            raise SharedError(box[1])
        result: T = box[0]
        return result


def window(config: Config, spike: TrainState, target: TrainState, onset: int) -> tuple[int, int]:
    """First and number of the global draws that are left out: the spike's steps and, by setting, those around.

    Args:
        spike: before the step at which it was seen.
        target: where the run goes back to; what it has taken stays taken.
        onset: step at which the spike began.
    """
    train, settings = config.train, config.spikes
    steps_back = min(spike.step - target.step, spike.step + 1 - onset + settings.skip_before)
    first = max(target.consumed_samples, consumed_before(steps_back, train, spike.consumed_samples))
    last = spike.consumed_samples + samples_of(1 + settings.skip_after, train, spike.consumed_samples) - 1
    begin = spike.data.next_draw(first)
    return begin, spike.data.next_draw(last) + 1 - begin
