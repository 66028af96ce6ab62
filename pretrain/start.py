"""Where a run starts: from scratch, or from the newest checkpoint that is sound."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.agreement import require_agreement
from pretrain.checkpoint import store
from pretrain.checkpoint.files import DamageError
from pretrain.checkpoint.initial import InitialWeights, check_initial, find_initial, load_initial
from pretrain.checkpoint.loading import load
from pretrain.config import Config
from pretrain.engine import Engine
from pretrain.errors import SharedError, UserError
from pretrain.recovery.memory import take_up
from pretrain.recovery.reports import recorded_rollbacks
from pretrain.resume import check_resume, vocabulary
from pretrain.run_data import RunData, open_data
from pretrain.state import TrainState


@dataclass(frozen=True)
class Start:
    """What was found before anything was started: the data, and where the run goes on or begins.

    Attributes:
        initial: weights to begin with, where there is no checkpoint.
        faults: newer checkpoints that are passed over because they are damaged, and how.
    """

    data: RunData
    state: TrainState
    checkpoint: Path | None
    record: dict[str, Any]
    faults: Mapping[Path, str]
    initial: InitialWeights | None = None

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint at that time, damaged or not."""
        return next(iter(self.faults), self.checkpoint)


def find_start(config: Config, world_size: int, faults: Mapping[Path, str] | None = None) -> Start:
    """Read what describes the data and the newest checkpoint that looks sound, and check them against the settings.

    Args:
        faults: checkpoints that are known to be damaged, and how.

    Raises:
        UserError: for whatever the user can mend.
    """
    data = open_data(config)
    checkpoint, record, faults = _newest_sound(config, faults or {})
    state = TrainState()
    if checkpoint is not None:
        check_resume(config, data.facts, checkpoint, record)
        state = TrainState.from_dict(record["state"])
        take_up(state, recorded_rollbacks(config.run.dir))
    initial = None
    if checkpoint is None and config.train.init_from:
        initial = find_initial(config.train.init_from)
        check_initial(config, vocabulary(config, data.facts), initial)
    data.go_on(config, state, checkpoint, record, world_size // config.parallel.ranks_of_a_replica)
    return Start(data, state, checkpoint, record, faults, initial)


def _newest_sound(config: Config, known: Mapping[Path, str]) -> tuple[Path | None, dict[str, Any], dict[Path, str]]:
    """The newest checkpoint that looks sound, its record, and the damaged ones passed over for it.

    Raises:
        DamageError: the settings do not allow to pass over, or there is none before.
    """
    faults: dict[Path, str] = {}
    for checkpoint in store.checkpoints(store.checkpoint_folder(config.run.dir)):
        try:
            if checkpoint in known:
                raise DamageError(known[checkpoint])
            return checkpoint, store.read_record(checkpoint), faults
        except DamageError as error:
            faults[checkpoint] = str(error)
            if config.checkpoint.on_damage == "stop":
                raise DamageError(f"{error}; checkpoint.on_damage=previous goes on from the one before") from None
    if faults:
        found = next(iter(faults.values()))
        raise DamageError(f"{found}; there is no sound one before it; restore its files, or choose another run.dir")
    return None, {}, {}


def load_start(config: Config, start: Start, engine: Engine, vocab_size: int, group: dist.ProcessGroup) -> Start:
    """Load the checkpoint of ``start``, or by setting the newest sound one before, or its initial weights; collective.

    Damaged ones that were passed over get another name once a sound one is loaded.

    Raises:
        SharedError: there is none to go on from, or it does not fit the settings.
    """
    while start.checkpoint is not None:
        try:
            load(engine, start.checkpoint, vocab_size, start.record, group)
            break
        except DamageError as error:
            faults = {**start.faults, start.checkpoint: str(error)}
        start.data.close()
        try:
            start = find_start(config, engine.place.world_size, faults)
        except UserError as error:
            raise SharedError(str(error)) from None
        require_agreement(config, start.data.facts, start.state, locked=True)
    if start.initial is not None:
        load_initial(engine, start.initial)
    if engine.place.global_rank == 0:
        for checkpoint, fault in start.faults.items():
            print(f"warning: {fault}; kept as {store.set_aside(checkpoint).name}", flush=True)
    return start
