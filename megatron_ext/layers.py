"""Building blocks that the layer specs name: the observed layers, norms, and attention by PyTorch's own kernels."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

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


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm built the way Megatron-core builds norms, and usable with sequence parallelism.

    Its gradient is a partial sum over the tensor-parallel group there: `weight.sequence_parallel` says so.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm built the way Megatron-core builds norms, and usable with sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


NORMS: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
"""By the value of TransformerConfig.normalization."""


class ScaledDotProductAttention(nn.Module):
    """Causal core attention by torch's scaled_dot_product_attention: no [sequence, sequence] matrix in memory.

    Grouped queries are supported; the head dimension may be split over the tensor-parallel group.

    Raises:
        ValueError: the config asks for something that this attention does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        wanted = {
            "context_parallel_size": (config.context_parallel_size, 1),
            "attention_dropout": (dropout, 0.0),
            "window_size": (config.window_size, None),
            "softmax_type": (config.softmax_type, "vanilla"),
            "attn_mask_type": (attn_mask_type, AttnMaskType.causal),
        }
        for name, (value, supported) in wanted.items():
            if value != supported:
                raise ValueError(f"{name} is {value}; ScaledDotProductAttention computes {supported} only")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend causally; `attention_mask` is ignored, as in Megatron-core's fused causal kernels.

        Args:
            query: [sequence, batch, heads, head_dim].
            key: [sequence, batch, groups, head_dim]; heads is a multiple of groups.
            value: as key.

        Returns:
            [sequence, batch, heads * head_dim].

        Raises:
            ValueError: packed sequences, an attention bias, or a key of another length (a key/value cache).
        """
        if packed_seq_params is not None or attention_bias is not None or key.shape[0] != query.shape[0]:
            raise ValueError("ScaledDotProductAttention takes whole sequences: no packing, attention bias or cache")
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended: Tensor = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return attended.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
