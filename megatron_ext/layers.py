"""The transformer layers that the layer specs name."""

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_ext.residual import SUBLAYERS, ExponentialResidual, largest_angle, sphere_radius, step_size
from megatron_ext.retraction import project_to_sphere
from megatron_ext.settings import ResidualSettings

Observer = Callable[[int, int, Tensor, Tensor], None]
"""Called with (layer_number, sublayer, state before, state after); states are [sequence, batch, hidden]."""


class ObservedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron-core's layer whose states can be watched, at no cost while nobody does.

    `residual` is not used here: every scheme's layer takes it, so that one spec builder serves all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        residual: ResidualSettings,
        **arguments: Any,
    ) -> None:
        super().__init__(config=config, submodules=submodules, layer_number=layer_number, **arguments)
        self.observer: Observer | None = None
        # The stock handler, torch.enable_grad, builds a graph under no_grad too, as in a recomputed forward pass.
        self.bias_dropout_add_exec_handler = contextlib.nullcontext

    def _forward_attention(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        output, context = super()._forward_attention(hidden_states, *arguments, **named)
        if self.observer is not None:
            self.observer(self.layer_number, 0, hidden_states, output)
        return output, context

    def _forward_mlp(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        output: Tensor = super()._forward_mlp(hidden_states, *arguments, **named)
        if self.observer is not None:
            self.observer(self.layer_number, 1, hidden_states, output)
        return output


class SphereLayer(ObservedLayer):
    """A layer whose states stay on a sphere; the first layer of the network puts its input there.

    Raises:
        ValueError: the config asks for dropout on the sublayers' outputs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        residual: ResidualSettings,
        **arguments: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, residual=residual, **arguments)
        if self.hidden_dropout:
            raise ValueError(
                f"hidden_dropout is {self.hidden_dropout}; the sphere residual needs 0 (Megatron's is 0.1)"
            )
        steps = [step_size(residual, self.layer_number, i, config.num_layers) for i in range(len(SUBLAYERS))]
        # build_module gives the bias-dropout-add modules neither the config nor the global layer number.
        self.self_attn_bda = ExponentialResidual(steps[0], largest_angle(residual))
        self.mlp_bda = ExponentialResidual(steps[1], largest_angle(residual))
        self.radius = sphere_radius(residual, config.hidden_size)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron-core's forward, after the projection in the network's first layer."""
        if self.layer_number == 1:
            hidden_states = project_to_sphere(hidden_states, self.radius)
        result: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *arguments, **named)
        return result
