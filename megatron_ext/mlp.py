"""Megatron-core's MLP with a SwiGLU that keeps its input alone for the backward pass."""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.kernels import Choice, kernels_of
from megatron_ext.kernels.config import choice_in


class SwiGLUMLP(MLP):  # type: ignore[misc]
    """As Megatron-core's own, whose gate and product, kept besides, are half as much again; see :func:`swiglu_mlp`."""

    linear_layers: MLPSubmodules

    def __init__(self, config: TransformerConfig, **named: Any) -> None:
        super().__init__(config, self.linear_layers, **named)
        self.kernels = choice_in(config)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """From [sequence, batch, hidden] to the same and the bias that is still to be added, if there is one.

        Raises:
            ValueError: a scale for each token, which belongs to a mixture of experts.
        """
        if per_token_scale is not None:
            raise ValueError("SwiGLUMLP takes no per_token_scale")
        hidden, bias = self.linear_fc1(hidden_states)
        result: tuple[Tensor, Tensor | None] = self.linear_fc2(swiglu(hidden, bias, self.kernels))
        return result


def swiglu_mlp(linear_layers: MLPSubmodules) -> type[SwiGLUMLP]:
    """The class with these linear layers. Not a spec: Megatron-core warns of each whose class is not its own."""
    return type("SwiGLUMLP", (SwiGLUMLP,), {"linear_layers": linear_layers})


def swiglu(gate_and_value: Tensor, bias: Tensor | None = None, kernels: Choice = "eager") -> Tensor:
    """silu(gate) value (SwiGLU, arXiv 2002.05202); only what it is computed from is kept for the backward pass.

    Args:
        gate_and_value: [..., 2 width], gate first.
        bias: [2 width], added before.
        kernels: which implementation, see :mod:`megatron_ext.kernels`.

    Returns:
        [..., width], same type.
    """
    hidden = gate_and_value if bias is None else gate_and_value + bias
    result: Tensor = _SwiGLU.apply(hidden, kernels)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_value: Tensor, choice: Choice) -> Tensor:
        ctx.kernels = kernels_of(choice, gate_and_value)
        ctx.save_for_backward(gate_and_value)
        result: Tensor = ctx.kernels.swiglu(gate_and_value.reshape(-1, gate_and_value.shape[-1]))
        return result.view(*gate_and_value.shape[:-1], result.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        of_rows, rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (grad, hidden))
        return ctx.kernels.swiglu_back(of_rows, rows).view(hidden.shape), None
