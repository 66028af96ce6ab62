"""Residual modules in Megatron-core's bias-dropout-add protocol.

The protocol: `module(training, fused)` returns a function of `((output, bias), residual, dropout_probability)`, where
output and residual are [sequence, batch, hidden] and bias is [hidden] or None, that returns the new state.
"""

import math
from collections.abc import Callable

from torch import Tensor, nn

from megatron_ext.retraction import STEP_SIZE_DECAYS, exponential_step
from megatron_ext.settings import ResidualSettings

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]

SUBLAYERS = ("attention", "mlp")
"""The sublayers of one layer, in their order."""


def step_size(settings: ResidualSettings, layer_number: int, sublayer: int, num_layers: int) -> float:
    """Step size alpha of one sublayer after the decay, dimensionless.

    Args:
        settings: `alpha`, `decay` and what the decay counts.
        layer_number: global and 1-based, whatever the pipeline stage.
        sublayer: index into :data:`SUBLAYERS`.
        num_layers: of the whole network.
    """
    per_layer = len(SUBLAYERS)
    by_layer = settings.step_index == "layer"
    index = layer_number if by_layer else per_layer * (layer_number - 1) + sublayer + 1
    count = num_layers if by_layer else per_layer * num_layers
    return settings.alpha * STEP_SIZE_DECAYS[settings.decay](index, count)


def sphere_radius(settings: ResidualSettings, hidden_size: int) -> float:
    """Norm of every state on the sphere."""
    return math.sqrt(hidden_size) if settings.radius == "sqrt_hidden" else float(settings.radius)


def largest_angle(settings: ResidualSettings) -> float | None:
    """The clamp in radians, None for none."""
    return None if settings.clamp == "none" else float(settings.clamp)


class ExponentialResidual(nn.Module):
    """Joins a sublayer's output to the stream by a step along the sphere (GeoNorm, arXiv 2601.22095).

    It has no parameters and no communication: the hidden dimension is whole on every rank at this point.
    """

    def __init__(self, step_size: float, max_angle: float | None) -> None:
        super().__init__()
        self.step_size = step_size
        self.max_angle = max_angle

    def forward(self, training: bool, fused: bool) -> BiasDropoutAdd:
        """The function of the protocol; dropout is refused when the layer is built."""
        return self._join

    def _join(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        update = output if bias is None else output + bias
        return exponential_step(residual, update, self.step_size, self.max_angle)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"step_size={self.step_size:.4g}, max_angle={self.max_angle}"
