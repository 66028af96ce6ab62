"""The registry of residual schemes: one frozen description each, and the specs that Megatron-core builds from."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.attention import ScaledDotProductAttention
from megatron_ext.layers import ObservedLayer, SphereLayer
from megatron_ext.norms import NORMS
from megatron_ext.settings import ResidualSettings

_NORM_PARAMETERS = {"RMSNorm": 1, "LayerNorm": 2}  # per hidden unit


@dataclass(frozen=True)
class Scheme:
    """One residual scheme.

    Attributes:
        name: the value of `ResidualSettings.scheme`.
        source: where its formula comes from.
        on_sphere: whether every state has the same norm.
        layer_spec: (config, settings) -> the ModuleSpec of one layer.
        parameters: (config) -> parameters that one layer has beside attention and MLP.
        flops: (hidden_size) -> forward FLOPs per token of one layer outside attention and MLP, a multiply-add as two.
    """

    name: str
    source: str
    on_sphere: bool
    layer_spec: Callable[[TransformerConfig, ResidualSettings], ModuleSpec]
    parameters: Callable[[TransformerConfig], int]
    flops: Callable[[int], int]


def residual_layer_spec(config: TransformerConfig, residual: ResidualSettings) -> ModuleSpec:
    """The spec of one transformer layer with the scheme that `residual` names.

    Raises:
        ValueError: unknown scheme.
    """
    if residual.scheme not in SCHEMES:
        raise ValueError(f"unknown residual scheme {residual.scheme!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[residual.scheme].layer_spec(config, residual)


def residual_block_spec(
    config: TransformerConfig, residual: ResidualSettings, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """What a Megatron-core GPTModel takes as `transformer_layer_spec`: this stage's layers and the final norm.

    Unlike a bare layer spec it brings a final norm that works with sequence parallelism.
    """
    layer = residual_layer_spec(config, residual)
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=NORMS[config.normalization])


def _base_spec(config: TransformerConfig, residual: ResidualSettings) -> ModuleSpec:
    """Megatron-core's local layer with our attention kernel, and checkpoint keys that equal the parameters' names."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    spec.submodules.sharded_state_dict_keys_map = {}
    spec.params = {"residual": residual}
    return spec


def _geonorm_spec(config: TransformerConfig, residual: ResidualSettings) -> ModuleSpec:
    spec = _base_spec(config, residual)
    spec.module = SphereLayer
    # States have a fixed norm: sublayers read them directly.
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = IdentityOp  # SphereLayer makes its own
    return spec


def _pre_norm_spec(config: TransformerConfig, residual: ResidualSettings) -> ModuleSpec:
    spec = _base_spec(config, residual)
    spec.module = ObservedLayer
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = NORMS[config.normalization]
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = get_bias_dropout_add
    return spec


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="geonorm",
            source="GeoNorm, arXiv 2601.22095: exponential map of the sphere",
            on_sphere=True,
            layer_spec=_geonorm_spec,
            parameters=lambda config: 0,
            # Per sublayer: <x,u>, |x|^2, v, |v|^2 at 2 each, y at 3.
            flops=lambda hidden_size: 2 * 11 * hidden_size,
        ),
        Scheme(
            name="pre_norm",
            source="x + F(N(x)): Xiong et al., arXiv 2002.04745",
            on_sphere=False,
            layer_spec=_pre_norm_spec,
            parameters=lambda config: 2 * _NORM_PARAMETERS[config.normalization] * config.hidden_size,
            # Per sublayer: |x|^2 at 2, scale and gain at 1 each, the addition at 1 (RMSNorm).
            flops=lambda hidden_size: 2 * 5 * hidden_size,
        ),
    )
}
"""Every scheme by its name."""
