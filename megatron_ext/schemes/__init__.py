"""The registry of residual schemes, and the specs that Megatron-core builds from them."""

from importlib import import_module

import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.backends import BACKENDS, Backend
from megatron_ext.mlp import swiglu_mlp
from megatron_ext.norms import model_norm
from megatron_ext.schemes.layer import ResidualLayer
from megatron_ext.schemes.scheme import Scheme
from megatron_ext.settings import ResidualSettings

_FILES = (
    "sphere",
    "additive",
    "post_norm",
)  # of this folder; each lists its schemes in SCHEMES

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for file in _FILES for scheme in import_module(f"{__name__}.{file}").SCHEMES
}
"""Every scheme by its name."""


def scheme_of(residual: ResidualSettings) -> Scheme:
    """The scheme that the settings name.

    Raises:
        ValueError: unknown scheme.
    """
    if residual.scheme not in SCHEMES:
        raise ValueError(f"unknown residual scheme {residual.scheme!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[residual.scheme]


def with_defaults(residual: ResidualSettings) -> ResidualSettings:
    """The settings with their scheme's defaults where nothing was said.

    Raises:
        ValueError: unknown scheme; a setting that means nothing to it, or one that is missing.
    """
    return scheme_of(residual).with_defaults(residual)


def residual_layer_spec(
    config: TransformerConfig, residual: ResidualSettings, backend: Backend = BACKENDS["local"]
) -> ModuleSpec:
    """The spec of one transformer layer with the scheme that `residual` names: Megatron-core's local layer with the
    backend's linear layers and attention, and checkpoint keys that equal the parameters' names.

    Raises:
        ValueError: as :func:`with_defaults`.
    """
    scheme, settings = scheme_of(residual), with_defaults(residual)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    spec.module = ResidualLayer
    spec.params = {"scheme": scheme, "settings": settings}
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = backend.core_attention
    mlp = layer.mlp.submodules
    attention.linear_qkv = mlp.linear_fc1 = backend.column_linear
    attention.linear_proj = mlp.linear_fc2 = backend.row_linear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = model_norm(config)
    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    if plain and config.gated_linear_unit and config.activation_func is F.silu:
        layer.mlp = swiglu_mlp(mlp)
    layer.input_layernorm = scheme.attention_norm(config, settings) or IdentityOp
    layer.pre_mlp_layernorm = scheme.mlp_norm(config, settings) or IdentityOp
    layer.self_attn_bda = layer.mlp_bda = IdentityOp  # ResidualLayer makes its own
    layer.sharded_state_dict_keys_map = {}
    return spec


def residual_block_spec(
    config: TransformerConfig,
    residual: ResidualSettings,
    *,
    vp_stage: int | None = None,
    backend: Backend = BACKENDS["local"],
) -> TransformerBlockSubmodules:
    """What a Megatron-core GPTModel takes as `transformer_layer_spec`: this stage's layers and the final norm.

    Unlike a bare layer spec it brings the scheme's own final norm, one that works with sequence parallelism.

    Raises:
        ValueError: as :func:`with_defaults`.
    """
    layer = residual_layer_spec(config, residual, backend)
    count = get_num_layers_to_build(config, vp_stage)
    final_norm = scheme_of(residual).final_norm(config, with_defaults(residual))
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=final_norm)


__all__ = ["SCHEMES", "Scheme", "residual_block_spec", "residual_layer_spec", "scheme_of", "with_defaults"]
