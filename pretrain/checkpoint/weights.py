"""The weights of a checkpoint alone, on one process, without an engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ext.initialize import EMBEDDING, OUTPUT_BIAS, OUTPUT_WEIGHT, global_names
from pretrain.checkpoint import store
from pretrain.checkpoint.contents import PlainReader, read_contents, read_tensors_alone, shapes
from pretrain.checkpoint.files import DamageError, find_damage

MASTERS = "fp32."
"""The names of the fp32 weights in a checkpoint begin with this."""


def count_parameters(checkpoint: Path) -> int:
    """Parameters in a checkpoint, padding of the vocabulary not counted.

    Raises:
        DamageError: the checkpoint is damaged or not one of ours.
    """
    return sum(shape.numel() for shape in _masters(checkpoint).values())


def require_sound(checkpoint: Path) -> None:
    """Compare all files of a checkpoint with what its record says; DamageError where they differ."""
    if fault := find_damage(checkpoint, store.recorded_files(checkpoint)):
        raise DamageError(fault)


class StoredWeights:
    """The fp32 masters of a checkpoint of any layout, read one tensor at a time by any process, alone.

    Attributes:
        shapes: global name -> whole shape, padding of the vocabulary not counted.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Read the table of contents; DamageError when it is damaged or not one of ours."""
        self.checkpoint = checkpoint
        self.shapes: Mapping[str, torch.Size] = _masters(checkpoint)
        self._reader = PlainReader(checkpoint)

    def read(self, name: str) -> Tensor:
        """One whole tensor, fp32 on the CPU; DamageError when it cannot be read."""
        wanted = {MASTERS + name: torch.empty(self.shapes[name], dtype=torch.float32)}
        read_tensors_alone(wanted, self._reader)
        return wanted[MASTERS + name]

    def require(self, name: str, shape: Sequence[int]) -> None:
        """DamageError unless there is a tensor of that name and shape."""
        if self.shapes.get(name) != torch.Size(shape):
            found = tuple(self.shapes[name]) if name in self.shapes else "missing"
            raise DamageError(
                f"{self.checkpoint} does not fit its own record: {name} is {found} instead of {tuple(shape)}"
            )


def load_weights(module: nn.Module, checkpoint: Path, vocab_size: int) -> None:
    """Fill every parameter of a whole model from the fp32 masters of a checkpoint of any layout.

    Args:
        module: what :func:`megatron_ext.build_model` gives; any floating type, any device.
        checkpoint: its folder.
        vocab_size: rows of the vocabulary in the checkpoint; rows of padding are zero.

    Raises:
        DamageError: the checkpoint is damaged, which is looked for in all of its files, or holds another model.
    """
    stored = StoredWeights(checkpoint)
    require_fit(module, stored, vocab_size)
    require_sound(checkpoint)
    fill(module, stored)


def require_fit(module: nn.Module, stored: StoredWeights, vocab_size: int) -> None:
    """DamageError unless every parameter of the whole model is stored, with ``vocab_size`` rows of the vocabulary."""
    for name, parameter in global_names(module).items():
        rows = vocab_size if name in (EMBEDDING, OUTPUT_WEIGHT, OUTPUT_BIAS) else parameter.shape[0]
        stored.require(name, (rows, *parameter.shape[1:]))


@torch.no_grad()
def fill(module: nn.Module, stored: StoredWeights) -> None:
    """Give every parameter of a whole model its stored values; rows of padding become zero."""
    for name, parameter in global_names(module).items():
        master = stored.read(name)
        parameter.zero_()
        parameter[: len(master)].copy_(master)


def _masters(checkpoint: Path) -> dict[str, torch.Size]:
    """Global name -> shape of the stored fp32 weights."""
    stored = shapes(read_contents(checkpoint))
    return {key.removeprefix(MASTERS): shape for key, shape in stored.items() if key.startswith(MASTERS)}
