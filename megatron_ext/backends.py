"""Where a layer's linear layers and attention kernel come from."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as engine
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_ext.attention import ScaledDotProductAttention


@dataclass(frozen=True)
class Backend:
    """Modules with Megatron-core's interfaces; parameters have the same names, shapes and divisions in each.

    Attributes:
        column_linear, row_linear: linear layers divided over tp by their outputs, and by their inputs.
        core_attention: causal.
        makes_on_gpu: whether its modules choose the current GPU themselves; else they follow `torch.device`.
    """

    column_linear: Any
    row_linear: Any
    core_attention: Any
    makes_on_gpu: bool


BACKENDS: dict[str, Backend] = {
    "local": Backend(ColumnParallelLinear, RowParallelLinear, ScaledDotProductAttention, makes_on_gpu=False),
    # Not its fused norm and linear layer: a scheme's norm, where it has one, stays the scheme's.
    "te": Backend(
        engine.TEColumnParallelLinear,
        engine.TERowParallelLinear,
        engine.TEDotProductAttention,
        makes_on_gpu=True,
    ),
}
"""By the value of `ModelSettings.backend`. `te` is written against megatron-core 0.16.1 and has NOT RUN yet."""


def what_backend_lacks(name: str) -> str | None:
    """What keeps a backend from running in this process, in words; None if nothing does."""
    if name != "te":
        return None
    if not engine.HAVE_TE:
        return "the package transformer-engine, which cannot be imported"
    return None if torch.cuda.is_available() else "a GPU, and CUDA finds none"
