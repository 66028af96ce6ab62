"""torch.compile for transformer layers, one graph each, without the rest of the model."""

import warnings
from collections.abc import Iterable

import torch._dynamo
from torch import nn

from megatron_ext.schemes.layer import ResidualLayer


def compile_layers(stages: Iterable[nn.Module]) -> None:
    """Have every transformer layer's training passes compiled; see :class:`ResidualLayer` for what stays eager."""
    # Megatron-core warns within its layers, which would cut each graph in three.
    torch._dynamo.config.ignore_logging_functions.add(warnings.warn)
    for stage in stages:
        for layer in stage.modules():
            if isinstance(layer, ResidualLayer):
                layer.compile_passes()
