"""Where a run starts: from scratch, or from the newest checkpoint that is sound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.checkpoint import store
from pretrain.checkpoint.files import DamageError
from pretrain.checkpoint.loading import load
from pretrain.config import Config
from pretrain.data.folder import Access
from pretrain.data.mixture import Mixture
from pretrain.data.shard_index import check_files
from pretrain.datasets import Dataset, access, load_datasets, require_room
from pretrain.engine import Engine
from pretrain.errors import SharedError, UserError
from pretrain.parallel import Place
from pretrain.resume import check_resume, go_on_with_data
from pretrain.rules import check_data
from pretrain.state import TrainState


@dataclass(frozen=True)
class Start:
    """What was found before anything was started: the data, and where the run goes on.

    Attributes:
        faults: newer checkpoints that are passed over because they are damaged, and how.
    """

    datasets: Sequence[Dataset]
    mixture: Mixture
    state: TrainState
    checkpoint: Path | None
    record: dict[str, Any]
    access: Access
    faults: Mapping[Path, str]


def find_start(config: Config, faults: Mapping[Path, str] | None = None) -> Start:
    """Read the manifests and the newest checkpoint that looks sound, and check them against the settings.

    Args:
        faults: checkpoints that are known to be damaged, and how.

    Raises:
        UserError: for whatever the user can mend.
    """
    reached = access(config.data)
    datasets = load_datasets(config.data, reached)
    check_data(config, datasets)
    require_room(datasets, config.data, config.model.sequence_length)
    for dataset in datasets:
        check_files(dataset.manifest)
    checkpoint, record, faults = _newest_sound(config, faults or {})
    state = TrainState()
    if checkpoint is not None:
        check_resume(config, datasets, checkpoint, record)
        state = TrainState.from_dict(record["state"])
    mixture = go_on_with_data(config, datasets, state, checkpoint)
    return Start(datasets, mixture, state, checkpoint, record, reached, faults)


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
        raise DamageError(f"{next(iter(faults.values()))}; there is no sound one before it")
    return None, {}, {}


def load_start(config: Config, start: Start, engine: Engine, vocab_size: int, group: dist.ProcessGroup) -> Start:
    """Load the checkpoint of ``start``, or by setting the newest sound one before; collective.

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
        start.access.close()
        try:
            start = find_start(config, faults)
        except UserError as error:
            raise SharedError(str(error)) from None
        agree_on_start(config, start.state, engine.place, locked=True)
    if engine.place.global_rank == 0:
        for checkpoint, fault in start.faults.items():
            print(f"warning: {fault}; kept as {store.set_aside(checkpoint).name}", flush=True)
    return start


def agree_on_start(config: Config, state: TrainState, place: Place, locked: bool) -> None:
    """Go on only if the run folder is ours and all ranks found the same checkpoint in it.

    Raises:
        SharedError: another run holds the folder, or it is not the same folder on all nodes.
    """
    facts = torch.tensor([state.step, -state.step, not locked], device=place.device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    highest, lowest, taken = int(facts[0]), -int(facts[1]), bool(facts[2])
    if taken:
        raise SharedError(f"run.dir={config.run.dir} is in use by another run; stop it or choose another run.dir")
    if highest != lowest:
        raise SharedError(
            f"run.dir={config.run.dir}: ranks found checkpoints of different steps ({lowest} and {highest}); "
            f"put run.dir on a file system that all nodes share"
        )
