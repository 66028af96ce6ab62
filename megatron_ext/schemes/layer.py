"""Megatron-core's transformer layer with a residual scheme."""

import contextlib
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megatron_ext.residual import SUBLAYERS, Sublayer
from megatron_ext.schemes.scheme import Scheme
from megatron_ext.settings import ResidualSettings


class ResidualLayer(TransformerLayer):  # type: ignore[misc]
    """A layer whose sublayers join the stream as the scheme says; the network's first layer holds the stream's entry.

    Args:
        settings: with the scheme's defaults filled in.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        scheme: Scheme,
        settings: ResidualSettings,
        **arguments: Any,
    ) -> None:
        super().__init__(config=config, submodules=submodules, layer_number=layer_number, **arguments)
        # build_module gives the bias-dropout-add modules neither the config nor the global layer number.
        self.self_attn_bda, self.mlp_bda = (
            scheme.residual(Sublayer(config, settings, self.layer_number, position))
            for position in range(len(SUBLAYERS))
        )
        first = self.layer_number == 1 and scheme.entry is not None
        self.entry = scheme.entry(config, settings) if first and scheme.entry else None
        # The stock handler, torch.enable_grad, builds a graph under no_grad too, as in a recomputed forward pass.
        self.bias_dropout_add_exec_handler = contextlib.nullcontext
        if self.recompute_mlp and config.add_bias_linear:
            self.mlp.register_forward_hook(_give_a_copy_of_the_bias)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron-core's forward, after the stream's entry in the network's first layer."""
        if self.entry is not None:
            hidden_states = self.entry(hidden_states)
        result: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *arguments, **named)
        return result


def _give_a_copy_of_the_bias(mlp: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> Any:
    """Megatron-core's MLP hands its last bias on as it is. From a recomputed MLP the parameter itself would come out as
    a result of the checkpoint, and its gradient would recompute the MLP again, without end."""
    mixed, bias = outputs
    return mixed, bias.clone()
