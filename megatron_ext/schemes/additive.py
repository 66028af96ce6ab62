"""Schemes whose stream is a sum: x + F(N(x)) and its relatives."""

import math
from collections.abc import Callable

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.norms import DynamicTanh, learned_scalar, mark_replicated, model_norm
from megatron_ext.residual import Residual, Sublayer
from megatron_ext.schemes.scheme import Scheme, norm_parameters, usual_norm
from megatron_ext.settings import ResidualSettings


class SumResidual(Residual):
    """x + F(...)."""

    def join(self, state: Tensor, increment: Tensor) -> Tensor:
        """As Megatron-core's own bias-dropout-add, bit for bit."""
        return state.to(increment.dtype) + increment


class NormedSumResidual(SumResidual):
    """x + N(F(...))."""

    def __init__(self, at: Sublayer) -> None:
        super().__init__(at)
        self.norm = model_norm(at.config)(at.config, at.config.hidden_size, at.config.layernorm_epsilon)

    def increment(self, state: Tensor, update: Tensor) -> Tensor:
        """The update with a norm of its own."""
        normed: Tensor = self.norm(update)
        return normed


def embedding_norm(config: TransformerConfig, settings: ResidualSettings) -> nn.Module:
    """A norm on the embedded tokens."""
    norm: nn.Module = model_norm(config)(config, config.hidden_size, config.layernorm_epsilon)
    return norm


DYT_STARTS = ((8192, 0.2, 0.05), (4096, 0.8, 0.2), (2048, 1.0, 0.5), (0, 1.0, 1.0))
"""(smallest hidden size, alpha in front of attention, alpha elsewhere): DyT, arXiv 2503.10622, its language models."""


def dyt_starts(config: TransformerConfig, settings: ResidualSettings) -> tuple[float, float]:
    """Start of alpha in front of attention and elsewhere: as set, else by width."""
    _, attention, other = next(row for row in DYT_STARTS if config.hidden_size >= row[0])
    return (
        attention if settings.dyt_attention_alpha is None else settings.dyt_attention_alpha,
        other if settings.dyt_alpha is None else settings.dyt_alpha,
    )


def _dyt_of_attention(config: TransformerConfig, settings: ResidualSettings) -> ModuleSpec:
    return ModuleSpec(module=DynamicTanh, params={"alpha": dyt_starts(config, settings)[0]})


def _dyt_elsewhere(config: TransformerConfig, settings: ResidualSettings) -> ModuleSpec:
    return ModuleSpec(module=DynamicTanh, params={"alpha": dyt_starts(config, settings)[1]})


class EmbeddingScale(nn.Module):
    """One learned factor on the embedded tokens, sqrt(hidden_size) at the start (DyT, arXiv 2503.10622)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = learned_scalar(math.sqrt(config.hidden_size), config.params_dtype)
        mark_replicated(self, config)

    def forward(self, embedded: Tensor) -> Tensor:
        """Same shape and type."""
        return self.scale * embedded


def _dyt_entry(config: TransformerConfig, settings: ResidualSettings) -> nn.Module | None:
    return EmbeddingScale(config) if settings.dyt_embedding_scale else None


def _dyt_parameters(config: TransformerConfig, settings: ResidualSettings) -> int:
    functions = 2 * int(config.num_layers) + 1
    return functions * (2 * int(config.hidden_size) + 1) + bool(settings.dyt_embedding_scale)


def _norms(per_layer: int, elsewhere: int) -> Callable[[TransformerConfig, ResidualSettings], int]:
    return lambda config, settings: (per_layer * int(config.num_layers) + elsewhere) * norm_parameters(config)


# Of RMSNorm: |x|^2 at 2, scale and gain at 1 each.
_NORM_FLOPS = 4

PRE_NORM = Scheme(
    name="pre_norm",
    source="x + F(N(x)): Xiong et al., arXiv 2002.04745",
    residual=SumResidual,
    attention_norm=usual_norm,
    mlp_norm=usual_norm,
    parameters=_norms(2, 1),
    flops=lambda hidden_size: 2 * (_NORM_FLOPS + 1) * hidden_size,
    defaults={"output_init": "scaled"},
)
SANDWICH_NORM = Scheme(
    name="sandwich_norm",
    source="x + N(F(N(x))): CogView, arXiv 2105.13290",
    residual=NormedSumResidual,
    attention_norm=usual_norm,
    mlp_norm=usual_norm,
    parameters=_norms(4, 1),
    flops=lambda hidden_size: 2 * (2 * _NORM_FLOPS + 1) * hidden_size,
    defaults={"output_init": "scaled"},
)
PERI_LN = Scheme(
    name="peri_ln",
    source="x + N(F(N(x))) with a norm on the embedding: Peri-LN, arXiv 2502.02732",
    residual=NormedSumResidual,
    attention_norm=usual_norm,
    mlp_norm=usual_norm,
    entry=embedding_norm,
    parameters=_norms(4, 2),
    flops=lambda hidden_size: 2 * (2 * _NORM_FLOPS + 1) * hidden_size,
    defaults={"output_init": "scaled"},
)
PRE_DYT = Scheme(
    name="pre_dyt",
    source="x + F(D(x)), D(x) = g tanh(a x) + b: DyT, arXiv 2503.10622",
    residual=SumResidual,
    attention_norm=_dyt_of_attention,
    mlp_norm=_dyt_elsewhere,
    final_norm=_dyt_elsewhere,
    entry=_dyt_entry,
    parameters=_dyt_parameters,
    # Per sublayer: a x, tanh (counted as one), gain, bias and the sum.
    flops=lambda hidden_size: 2 * 5 * hidden_size,
    defaults={"output_init": "scaled", "dyt_attention_alpha": None, "dyt_alpha": None, "dyt_embedding_scale": False},
)

SCHEMES = (PRE_NORM, SANDWICH_NORM, PERI_LN, PRE_DYT)
"""What this file adds to the registry."""
