"""The weights of a checkpoint alone, on one process, without an engine."""

from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ext.initialize import EMBEDDING, OUTPUT_BIAS, OUTPUT_WEIGHT, global_names
from pretrain.checkpoint import store
from pretrain.checkpoint.contents import read_contents, read_tensors, shapes
from pretrain.checkpoint.files import DamageError, find_damage

_MASTERS = "fp32."


def count_parameters(checkpoint: Path) -> int:
    """Parameters in a checkpoint, padding of the vocabulary not counted.

    Raises:
        DamageError: the checkpoint is damaged or not one of ours.
    """
    return sum(shape.numel() for shape in _masters(checkpoint).values())


@torch.no_grad()
def load_weights(module: nn.Module, checkpoint: Path, vocab_size: int) -> None:
    """Fill every parameter of a whole model from the fp32 masters of a checkpoint of any layout.

    torch.distributed must run, with this process alone in it.

    Args:
        module: what :func:`megatron_ext.build_model` gives; any floating type, any device.
        checkpoint: its folder.
        vocab_size: rows of the vocabulary in the checkpoint; rows of padding are zero.

    Raises:
        DamageError: the checkpoint is damaged, which is looked for in all of its files, or holds another model.
    """
    stored = _masters(checkpoint)
    wanted: dict[str, Tensor] = {}
    for name, parameter in global_names(module).items():
        rows = vocab_size if name in (EMBEDDING, OUTPUT_WEIGHT, OUTPUT_BIAS) else parameter.shape[0]
        shape = torch.Size((rows, *parameter.shape[1:]))
        if stored.get(name) != shape:
            raise DamageError(
                f"{checkpoint} does not fit its own record: {name} is {stored.get(name)} instead of {shape}"
            )
        wanted[_MASTERS + name] = torch.empty(shape, dtype=torch.float32)
    if fault := find_damage(checkpoint, store.recorded_files(checkpoint)):
        raise DamageError(fault)
    read_tensors(wanted, checkpoint)
    for name, parameter in global_names(module).items():
        master = wanted[_MASTERS + name]
        parameter.zero_()
        parameter[: len(master)].copy_(master)


def _masters(checkpoint: Path) -> dict[str, torch.Size]:
    """Global name -> shape of the stored fp32 weights."""
    stored = shapes(read_contents(checkpoint))
    return {key.removeprefix(_MASTERS): shape for key, shape in stored.items() if key.startswith(_MASTERS)}
