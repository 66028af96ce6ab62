"""Load a run from a checkpoint of any layout, and find damage while doing so."""

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict

from pretrain.checkpoint import store
from pretrain.checkpoint.contents import read_contents, read_tensors, shapes
from pretrain.checkpoint.files import DamageError, FileFacts, find_damage
from pretrain.checkpoint.fragments import sharded_state
from pretrain.deepspeed_compat import create_adam_state, finish_load
from pretrain.engine import Engine

_FILE_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")


def load(
    engine: Engine, checkpoint: Path, vocab_size: int, record: dict[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Fill masters, moments and working weights from ``checkpoint``, saved in any layout; collective.

    Every file is read from end to end by one of the ranks, beside the loading, and compared with its checksum.

    Args:
        record: what :func:`pretrain.checkpoint.store.read_record` gave.
        group: all ranks; left out, the default one.

    Raises:
        DamageError: on all ranks: the files are not what was saved. The engine holds nothing of use then.
    """
    create_adam_state(engine.deepspeed)
    state = sharded_state(engine, vocab_size, saving=False)
    agree(_misfit(checkpoint, state), group)
    check = _Check(checkpoint, _share_of(store.recorded_files(checkpoint)))
    fault = None
    try:
        read_tensors(mcore_to_pyt_state_dict(_by_key(state), is_loading=True), checkpoint, group)
    except DamageError as error:
        fault = str(error)
    agree(check.wait() or fault, group)
    finish_load(engine.deepspeed, record["adam_step"])


def _misfit(checkpoint: Path, state: dict[str, ShardedTensor]) -> str | None:
    """Why the table of contents cannot serve ``state``, if so."""
    try:
        stored = shapes(read_contents(checkpoint))
    except DamageError as error:
        return str(error)
    for shard in state.values():
        if stored.get(shard.key) != shard.global_shape:
            found = tuple(stored[shard.key]) if shard.key in stored else "missing"
            return f"{checkpoint} does not fit its own record: {shard.key} is {found} instead of {shard.global_shape}"
    return None


def _by_key(state: dict[str, ShardedTensor]) -> dict[str, list[ShardedTensor]]:
    grouped: dict[str, list[ShardedTensor]] = {}
    for shard in state.values():
        grouped.setdefault(shard.key, []).append(shard)
    return grouped


def _share_of(files: Mapping[str, FileFacts]) -> dict[str, FileFacts]:
    """The files that this rank compares with their checksums: in the layout of the save those that it reads too."""
    mine = {}
    for name, facts in files.items():
        match = _FILE_OF_RANK.fullmatch(name)
        if (int(match[1]) if match else 0) % dist.get_world_size() == dist.get_rank():
            mine[name] = facts
    return mine


class _Check:
    """Looks for damage in a thread, which also brings the files into the system's cache for the loading beside it."""

    def __init__(self, checkpoint: Path, files: Mapping[str, FileFacts]) -> None:
        self._checkpoint, self._files = checkpoint, files
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def wait(self) -> str | None:
        """What was found."""
        self._thread.join()
        return self._fault

    def _run(self) -> None:
        self._fault = find_damage(self._checkpoint, self._files)


def agree(fault: str | None, group: dist.ProcessGroup | None = None) -> None:
    """DamageError on all ranks when any has a fault, with that of the lowest one; collective."""
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault, group=group)
    for found in faults:
        if found is not None:
            raise DamageError(found)
