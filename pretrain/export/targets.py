"""Which class of transformers computes a model of ours, and with which configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext import ModelSettings, with_defaults
from megatron_ext.schemes.sphere import POWERS
from megatron_ext.settings import ResidualSettings
from pretrain.errors import UserError
from pretrain.export.names import GPT2_NAMES, Names, llama_names

MODULE_FILES = ("configuration_sphere_pretrain", "residual_sphere_pretrain", "modeling_sphere_pretrain")
"""Of the folder ``shipped``: what is copied beside weights that no class of transformers itself computes."""

_ITS_FINAL_NORM = {"post_norm": "none", "deep_norm": "none", "keel": "none", "pre_dyt": "dyt"}
_SCHEMES = ("geonorm", "proj", "cayley", "p", "ngpt_lerp", "pre_norm", "sandwich_norm", "peri_ln", *_ITS_FINAL_NORM)


@dataclass(frozen=True)
class Target:
    """A model as transformers knows it.

    Attributes:
        architecture: name of the class.
        settings: its configuration.
        names: of its weights.
        needs_code: it is computed by files shipped with the weights, so loading takes ``trust_remote_code=True``.
        reasons: why it is none of transformers' own classes.
    """

    architecture: str
    settings: dict[str, Any]
    names: Names
    needs_code: bool
    reasons: tuple[str, ...] = ()


def target_of(model: ModelSettings, vocab_size: int) -> Target:
    """LlamaForCausalLM or GPT2LMHeadModel where these compute exactly the model, else our own modelling files.

    Raises:
        UserError: a scheme that the modelling files do not know.
    """
    reasons = []
    for architecture, faults, make in (
        ("LlamaForCausalLM", not_llama(model), _llama),
        ("GPT2LMHeadModel", not_gpt2(model), _gpt2),
    ):
        if not faults:
            return make(model, vocab_size)
        reasons.append(f"{architecture} has no {', '.join(faults)}")
    return _own(model, vocab_size, tuple(reasons))


def not_llama(model: ModelSettings) -> list[str]:
    """The settings by which a model differs from Llama; none if it is one."""
    return _differences(model, positions=("rope",), activation=("swiglu",), normalization=("rmsnorm",))


def not_gpt2(model: ModelSettings) -> list[str]:
    """The settings by which a model differs from GPT-2; none if it is one."""
    found = _differences(
        model,
        positions=("learned",),
        activation=("gelu", "gelu_tanh"),
        normalization=("layernorm",),
        linear_bias=(True,),
    )
    groups = model.num_query_groups
    return [*found, *([f"num_query_groups={groups}"] if groups not in (None, model.num_attention_heads) else [])]


def _differences(model: ModelSettings, **wanted: tuple[Any, ...]) -> list[str]:
    wanted |= {"qk_norm": (False,), "output_bias": ("none",)}
    scheme = model.residual.scheme
    found = [f"{name}={value}" for name, known in wanted.items() if (value := getattr(model, name)) not in known]
    return [*([] if scheme == "pre_norm" else [f"scheme {scheme}"]), *found]


def _llama(model: ModelSettings, vocab_size: int) -> Target:
    settings = {
        **_shape(model, vocab_size),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "rope_theta": model.rope_base,  # where releases before 5.0 look for it
        "attention_bias": model.linear_bias,
        "mlp_bias": model.linear_bias,
    }
    return Target("LlamaForCausalLM", settings, llama_names(gated=True), needs_code=False)


def _gpt2(model: ModelSettings, vocab_size: int) -> Target:
    settings = {
        "vocab_size": vocab_size,
        "n_positions": model.sequence_length,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }
    return Target("GPT2LMHeadModel", settings, GPT2_NAMES, needs_code=False)


def _own(model: ModelSettings, vocab_size: int, reasons: tuple[str, ...]) -> Target:
    residual = with_defaults(model.residual)
    if residual.scheme not in _SCHEMES:
        raise UserError(
            f"model.residual.scheme={residual.scheme} is not in the modelling file; write it there too, as a class in "
            f"RESIDUALS of pretrain/export/shipped/residual_sphere_pretrain.py and a name in pretrain/export/targets.py"
        )
    settings = {
        **_shape(model, vocab_size),
        "activation": model.activation,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "positions": model.positions,
        "rope_base": model.rope_base,
        "qk_norm": model.qk_norm,
        "linear_bias": model.linear_bias,
        "output_bias": model.output_bias != "none",
        "final_norm": _ITS_FINAL_NORM.get(residual.scheme) or residual.final_norm or model.normalization,
        **_residual(residual),
        "auto_map": {
            "AutoConfig": "configuration_sphere_pretrain.SpherePretrainConfig",
            "AutoModelForCausalLM": "modeling_sphere_pretrain.SpherePretrainForCausalLM",
        },
    }
    names = llama_names(gated=model.activation == "swiglu")
    return Target("SpherePretrainForCausalLM", settings, names, needs_code=True, reasons=reasons)


def _shape(model: ModelSettings, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "max_position_embeddings": model.sequence_length,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _residual(residual: ResidualSettings) -> dict[str, Any]:
    """The scheme with its settings; one that means nothing to it is left out."""
    power: dict[str, Callable[[], float | None]] = {"p": lambda: residual.p, "geonorm": lambda: None}
    scheme = residual.scheme
    found: dict[str, Any] = {"scheme": scheme, "power": power.get(scheme, lambda: POWERS.get(scheme))()}
    for name in ("decay", "step_index", "alpha", "learn_alpha", "angle_scale", "learn_angle_scale"):
        if (value := getattr(residual, name)) is not None:
            found[name] = value
    found["clamp"] = None if residual.clamp == "none" else residual.clamp
    found["radius"] = None if residual.radius == "sqrt_hidden" else residual.radius
    found["embedding_scale"] = bool(residual.dyt_embedding_scale)
    return found
