"""torch.compile for transformer layers, one graph each, without the rest of the model."""

import warnings
from collections.abc import Iterable

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError

from megatron_ext.schemes.layer import ResidualLayer


def why_not_compile(device: torch.device) -> str | None:
    """What keeps torch.compile from working here, in one line; None if it works."""
    probe = torch.compile(lambda x: x.sin() + 1)
    try:
        with inductor.patch(force_disable_caches=True):  # else a cached result would hide a missing compiler
            probe(torch.zeros(16, device=device))
    except (InductorError, TorchDynamoException) as error:
        return str(error).splitlines()[0]
    return None


def compile_layers(stages: Iterable[nn.Module]) -> None:
    """Have every transformer layer's training passes compiled; see :class:`ResidualLayer` for what stays eager."""
    # Megatron-core warns within its layers, which would cut each graph in three.
    torch._dynamo.config.ignore_logging_functions.add(warnings.warn)
    for stage in stages:
        for layer in stage.modules():
            if isinstance(layer, ResidualLayer):
                layer.compile_passes()
