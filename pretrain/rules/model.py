"""Rules about the model and its residual scheme; see :mod:`pretrain.rules`, which checks them."""

import difflib
import math

from megatron_ext.schemes import SCHEMES, with_defaults
from megatron_ext.schemes.sphere import power_of, why_output_is_unsafe
from pretrain.config import Config


def sizes_are_positive(config: Config) -> str | None:
    """Layer counts and widths are positive integers."""
    model, parallel = config.model, config.parallel
    sizes = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.sequence_length": model.sequence_length,
        "model.vocab_size": model.vocab_size,
        "model.rope_base": model.rope_base,
        "model.norm_epsilon": model.norm_epsilon,
        "model.init_std": model.init_std,
        "parallel.tp": parallel.tp,
        "parallel.pp": parallel.pp,
        "parallel.vpp": parallel.vpp,
        "parallel.cp": parallel.cp,
    }
    for name, size in sizes.items():
        if size is not None and not 0 < size < math.inf:
            return f"{name}={size}: must be positive"
    return None


def heads_divide_hidden_size(config: Config) -> str | None:
    """Every head has the same number of channels."""
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if hidden % heads:
        return f"model.hidden_size={hidden} is not divisible by model.num_attention_heads={heads}; change either"
    return None


def rope_needs_an_even_head_width(config: Config) -> str | None:
    """RoPE turns pairs of channels."""
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if config.model.positions == "rope" and (hidden // heads) % 2:
        return (
            f"model.hidden_size={hidden} over model.num_attention_heads={heads} gives heads of {hidden // heads} "
            f"channels, which model.positions=rope needs to be even; change either, or model.positions"
        )
    return None


def dropout_is_a_share(config: Config) -> str | None:
    """Dropout keeps something."""
    dropout = config.model.dropout
    return None if 0 <= dropout < 1 else f"model.dropout={dropout}: must be in [0, 1), for example 0.1"


def z_loss_is_a_weight(config: Config) -> str | None:
    """The z-loss is added, not taken away."""
    z_loss = config.model.z_loss
    return None if 0 <= z_loss < math.inf else f"model.z_loss={z_loss}: must be 0 (off) or positive, for example 1e-4"


def query_groups_divide_heads(config: Config) -> str | None:
    """Every key/value head serves the same number of query heads."""
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if groups is not None and heads % groups:
        return f"model.num_query_groups={groups} does not divide model.num_attention_heads={heads}; change either"
    return None


def scheme_is_known(config: Config) -> str | None:
    """The residual scheme is in the registry."""
    scheme = config.model.residual.scheme
    if scheme in SCHEMES:
        return None
    near = difflib.get_close_matches(scheme.lower(), SCHEMES, n=1, cutoff=0.0)
    return f"model.residual.scheme={scheme}: unknown; did you mean {near[0]}? (known: {', '.join(SCHEMES)})"


def residual_settings_fit_the_scheme(config: Config) -> str | None:
    """Nothing is set that means nothing to the scheme, and nothing that it needs is missing."""
    try:
        with_defaults(config.model.residual)
    except ValueError as error:
        return str(error)
    return None


def residual_numbers_are_positive(config: Config) -> str | None:
    """Exponent, step size, scales and radius are positive, and fp32 holds their squares: a state must not become 0."""
    residual = config.model.residual
    for name in ("p", "alpha", "angle_scale", "radius", "dyt_attention_alpha", "dyt_alpha"):
        value = getattr(residual, name)
        if isinstance(value, (int, float)) and not 0 < value < math.inf:
            words = ", sqrt_hidden or learned" if name == "radius" else ""
            return f"model.residual.{name}={value}: must be positive{words}"
        if isinstance(value, (int, float)) and not 1e-9 <= value <= 1e9:
            return f"model.residual.{name}={value}: its square leaves fp32; choose a number between 1e-9 and 1e9"
    return None


def clamp_is_within_half_a_turn(config: Config) -> str | None:
    """The exponential map is one-to-one up to half a turn."""
    clamp = config.model.residual.clamp
    if isinstance(clamp, (int, float)) and not 0 < clamp <= math.pi:
        return f"model.residual.clamp={clamp}: must be an angle in (0, pi] radians, or none"
    return None


def saved_output_shows_the_update(config: Config) -> str | None:
    """A step's update can be rebuilt from its output in the backward pass."""
    if residual_settings_fit_the_scheme(config):
        return None
    residual = with_defaults(config.model.residual)
    if residual.save != "output":
        return None
    reason = why_output_is_unsafe(residual, power_of(residual))
    return f"model.residual.save=output: {reason}, or use save=update" if reason else None


def te_takes_whole_samples(config: Config) -> str | None:
    """Transformer Engine's kernels get what they were written for here: whole samples, uncompiled."""
    if config.model.backend != "te":
        return None
    others = {
        "parallel.cp": config.parallel.cp > 1,
        "data.separate_documents": config.data.separate_documents,
        "train.compile": config.train.compile,
    }
    for name, is_on in others.items():
        if is_on:
            return f"model.backend=te does not go with {name}; set model.backend=local, or remove it"
    return None
