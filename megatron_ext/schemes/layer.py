"""Megatron-core's transformer layer with a residual scheme."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
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
        self._compiled: Callable[..., tuple[Tensor, Tensor | None]] | None = None
        if self.recompute_mlp and config.add_bias_linear:
            self.mlp.register_forward_hook(_give_a_copy_of_the_bias)

    def compile_passes(self) -> None:
        """From now on run training passes through torch.compile.

        Evaluation and passes that are observed stay eager: so the graphs that a run makes, and the rounding that comes
        with each, do not depend on where it was resumed.
        """
        self._compiled = torch.compile(super().forward)

    @property
    def _is_observed(self) -> bool:
        return any(residual.observer is not None for residual in (self.self_attn_bda, self.mlp_bda))

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron-core's forward, after the stream's entry in the network's first layer."""
        if self.entry is not None:
            hidden_states = self.entry(hidden_states)
        eager = self._compiled is None or not self.training or self._is_observed
        run: Any = super().forward if eager else self._compiled
        result: tuple[Tensor, Tensor | None] = run(hidden_states, *arguments, **named)
        return result


def _give_a_copy_of_the_bias(mlp: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> Any:
    """Megatron-core's MLP hands its last bias on as it is. From a recomputed MLP the parameter itself would come out as
    a result of the checkpoint, and its gradient would recompute the MLP again, without end."""
    mixed, bias = outputs
    return mixed, bias.clone()
