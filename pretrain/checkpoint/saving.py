"""Save and load a run: the collective part of a checkpoint."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from pretrain.checkpoint import store
from pretrain.checkpoint.fragments import sharded_state
from pretrain.deepspeed_compat import adam_step, create_adam_state, finish_load
from pretrain.engine import Engine


def save(engine: Engine, directory: Path, step: int, vocab_size: int, record: dict[str, Any]) -> None:
    """Write the checkpoint of ``step`` below ``directory``; collective, returns when it is durable.

    Args:
        record: JSON-ready facts kept beside the tensors; global rank 0's counts.
    """
    names = [str(store.new_partial(directory, step)) if engine.place.global_rank == 0 else ""]
    dist.broadcast_object_list(names, src=0, device=engine.place.device)
    partial = Path(names[0])
    create_adam_state(engine.deepspeed)
    dist_checkpointing.save(sharded_state(engine, vocab_size, saving=True), str(partial))
    if engine.place.global_rank == 0:
        store.publish(partial, step, record | {"adam_step": adam_step(engine.deepspeed)})
    dist.barrier()


def load(engine: Engine, checkpoint: Path, vocab_size: int, record: dict[str, Any]) -> None:
    """Fill masters, moments and working weights from ``checkpoint``, saved in any layout; collective."""
    create_adam_state(engine.deepspeed)
    dist_checkpointing.load(sharded_state(engine, vocab_size, saving=False), str(checkpoint))
    finish_load(engine.deepspeed, record["adam_step"])
