"""Norms built the way Megatron-core builds them, and usable with sequence parallelism."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_ext.kernels import Choice, row_kernels_of
from megatron_ext.kernels.config import choice_in


def mark_replicated(module: nn.Module, config: TransformerConfig) -> None:
    """Say that every tensor-parallel rank holds all of the module's parameters, applied to its own tokens.

    With sequence parallelism their gradients are then partial sums over the tensor-parallel group:
    `parameter.sequence_parallel` says so.
    """
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with a gain; it keeps its input and one number a row for the backward pass on any device."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.kernels = choice_in(config)
        mark_replicated(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type."""
        if x.device.type != "cpu":
            return super().forward(x)
        # On the CPU torch's own keeps fp32 copies.
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.kernels)  # type: ignore[no-untyped-call]
        return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, choice: Choice) -> Tensor:
        ctx.kernels = row_kernels_of(choice, x)
        result, factor = ctx.kernels.norm(x.reshape(-1, x.shape[-1]), gain, eps)
        ctx.save_for_backward(x, gain, factor)
        normed: Tensor = result.view(x.shape)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gain, factor = ctx.saved_tensors
        rows = (tensor.reshape(-1, x.shape[-1]) for tensor in (grad, x))
        grad_x, grad_gain = ctx.kernels.norm_back(*rows, gain, factor)
        return grad_x.view(x.shape), grad_gain, None, None


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm with a gain and a bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_replicated(self, config)


class DynamicTanh(nn.Module):
    """gain * tanh(alpha x) + bias, with one learned alpha (DyT, arXiv 2503.10622).

    Args:
        config: gives the parameters' type.
        hidden_size: of x [..., hidden_size].
        eps: not used; every norm takes it.
        alpha: at the start.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, alpha: float) -> None:
        super().__init__()
        self.alpha = learned_scalar(alpha, config.params_dtype)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        mark_replicated(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type."""
        return torch.tanh(self.alpha * x) * self.weight + self.bias


def learned_scalar(start: float, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of one element that begins at `start`."""
    return starting_at(nn.Parameter(torch.full((1,), start, dtype=dtype)), start)


def starting_at(parameter: nn.Parameter, start: float) -> nn.Parameter:
    """Note where a parameter begins, for the initialisation by name."""
    parameter.initial_value = start  # type: ignore[attr-defined]
    return parameter


NORMS: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By the value of TransformerConfig.normalization."""

NORM_NAMES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
"""The settings' names of Megatron-core's."""


def model_norm(config: TransformerConfig) -> Any:
    """The class of the model's norm."""
    return NORMS[config.normalization]
