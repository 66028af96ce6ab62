"""Residual modules in Megatron-core's bias-dropout-add protocol.

The protocol: `module(training, fused)` returns a function of `((output, bias), residual, dropout_probability)`, where
output and residual are [sequence, batch, hidden] and bias is [hidden] or None, that returns the new state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.settings import ResidualSettings

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]

SUBLAYERS = ("attention", "mlp")
"""The sublayers of one layer, in their order."""


@dataclass(frozen=True)
class Sublayer:
    """Where a residual module stands, and what it may depend on.

    Attributes:
        config: Megatron-core's configuration of the model.
        settings: of the residual, with the scheme's defaults filled in.
        layer_number: global and 1-based, whatever the pipeline stage.
        position: index into :data:`SUBLAYERS`.
    """

    config: TransformerConfig
    settings: ResidualSettings
    layer_number: int
    position: int

    @property
    def index(self) -> int:
        """1-based index over all sublayers of the network."""
        return len(SUBLAYERS) * (self.layer_number - 1) + self.position + 1

    @property
    def count(self) -> int:
        """Sublayers of the whole network."""
        return len(SUBLAYERS) * int(self.config.num_layers)


class Residual(nn.Module):
    """One sublayer's way back into the stream: a scheme says how in :meth:`join`.

    It has no communication: the hidden dimension is whole on every rank at this point. Parameters must be marked by
    :func:`megatron_ext.norms.mark_replicated`.
    """

    def __init__(self, at: Sublayer) -> None:
        super().__init__()
        self.layer_number, self.position = at.layer_number, at.position
        self.observer: Observer | None = None

    def join(self, state: Tensor, increment: Tensor) -> Tensor:
        """The new state, shape and type of `state` [sequence, batch, hidden]."""
        raise NotImplementedError

    def increment(self, state: Tensor, update: Tensor) -> Tensor:
        """What of the sublayer's output (bias and dropout included) goes to :meth:`join`: by default all of it."""
        return update

    def step_size(self) -> float | Tensor:
        """The factor of the increment relative to the state, dimensionless; for the diagnostics."""
        return 1.0

    def share_clamped(self, beta: Tensor) -> Tensor:
        """1.0 where a step of normalised size `beta` (fp32, any shape) is cut off by a clamp; else 0.0."""
        return beta.new_zeros(beta.shape)

    def forward(self, training: bool, fused: bool) -> BiasDropoutAdd:
        """The function of the protocol."""

        def bias_dropout_add(output_with_bias: tuple[Tensor, Tensor | None], state: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return self.take(state, output, bias, dropout if training else 0.0)

        return bias_dropout_add

    def take(self, state: Tensor, output: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
        """The new state from a sublayer's output, its bias [hidden] and the share of elements to drop; tells the
        observer."""
        increment = self.increment(state, F.dropout(output if bias is None else output + bias, dropout))
        new_state = self.join(state, increment)
        if self.observer is not None:
            self.observer(self, state, increment, new_state)
        return new_state


class Observer(Protocol):
    """Watches a residual module at work, at no cost while nobody does."""

    def __call__(self, residual: Residual, state: Tensor, increment: Tensor, new_state: Tensor) -> None:
        """States and increment are [sequence, batch, hidden]."""
