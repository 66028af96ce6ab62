"""Schemes that normalise the stream itself: N(a x + F(...))."""

import math

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.norms import model_norm
from megatron_ext.residual import Residual, Sublayer
from megatron_ext.schemes.scheme import Matrix, Scheme, no_norm, norm_parameters, usual_norm
from megatron_ext.settings import ResidualSettings


class PostNormResidual(Residual):
    """N(a x + F(...)) with a constant a."""

    def __init__(self, at: Sublayer, state_scale: float = 1.0) -> None:
        super().__init__(at)
        self.state_scale = state_scale
        self.norm = model_norm(at.config)(at.config, at.config.hidden_size, at.config.layernorm_epsilon)

    def join(self, state: Tensor, increment: Tensor) -> Tensor:
        """The norm of the weighted sum."""
        scaled = state if self.state_scale == 1.0 else self.state_scale * state
        new_state: Tensor = self.norm(scaled + increment)
        return new_state

    def step_size(self) -> float:
        """The norm sees only the ratio of the two parts."""
        return 1 / self.state_scale

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"state_scale={self.state_scale:.4g}"


def _deep_norm_residual(at: Sublayer) -> Residual:
    return PostNormResidual(at, (2 * at.config.num_layers) ** 0.25)


def deep_norm_std(matrix: Matrix) -> float | Tensor:
    """Xavier's, with gain (8 L)^(-1/4) on values, output projections and the MLP; the embedding keeps `init_std`.

    Query and key rows of the fused projection keep gain 1. Fan-in and fan-out are those of each matrix before it is
    fused: queries, keys, values, gate and value of a gated MLP count apart (DeepNet, arXiv 2203.00555).

    Returns:
        A number, or one for each row of the matrix, [output, 1].
    """
    config, (rows, columns) = matrix.config, matrix.shape
    gain = float((8 * config.num_layers) ** -0.25)
    if matrix.name.endswith("linear_qkv.weight"):
        head, groups = int(config.kv_channels), int(config.num_query_groups)
        queries = int(config.num_attention_heads) // groups * head
        # Each group holds its query heads, then one key and one value head.
        of_group = torch.tensor(
            [_xavier(groups * queries, columns)] * queries
            + [_xavier(groups * head, columns)] * head
            + [gain * _xavier(groups * head, columns)] * head
        )
        return of_group.repeat(groups)[:, None]
    if matrix.is_output_projection:
        return gain * _xavier(rows, columns)
    if matrix.name.endswith("linear_fc1.weight"):
        return gain * _xavier(rows // (2 if config.gated_linear_unit else 1), columns)
    return matrix.std


def _xavier(rows: int, columns: int) -> float:
    return math.sqrt(2 / (rows + columns))


def _keel_residual(at: Sublayer) -> Residual:
    # The embedding has another scale than a normed state, so the first sublayer is not weighted.
    return PostNormResidual(at, 1.0 if at.index == 1 else float(at.count))


def _norms(config: TransformerConfig, settings: ResidualSettings) -> int:
    return 2 * int(config.num_layers) * norm_parameters(config)


def _keel_norms(config: TransformerConfig, settings: ResidualSettings) -> int:
    return 4 * int(config.num_layers) * norm_parameters(config)


# Per sublayer: the sum at 1, RMSNorm: |x|^2 at 2, scale and gain at 1 each; a weight on the state at 1.
POST_NORM = Scheme(
    name="post_norm",
    source="N(x + F(x)): Vaswani et al., arXiv 1706.03762",
    residual=PostNormResidual,
    final_norm=no_norm,
    parameters=_norms,
    flops=lambda hidden_size: 2 * 5 * hidden_size,
    defaults={"output_init": "plain"},
)
DEEP_NORM = Scheme(
    name="deep_norm",
    source="N((2 L)^(1/4) x + F(x)): DeepNet, arXiv 2203.00555",
    residual=_deep_norm_residual,
    final_norm=no_norm,
    initial_std=deep_norm_std,
    parameters=_norms,
    flops=lambda hidden_size: 2 * 6 * hidden_size,
)
KEEL = Scheme(
    name="keel",
    source="N(A x + F(N(x))), A the number of sublayers: Keel, arXiv 2601.19895",
    residual=_keel_residual,
    attention_norm=usual_norm,
    mlp_norm=usual_norm,
    final_norm=no_norm,
    parameters=_keel_norms,
    flops=lambda hidden_size: 2 * 10 * hidden_size,
    defaults={"output_init": "scaled"},
)

SCHEMES = (POST_NORM, DEEP_NORM, KEEL)
"""What this file adds to the registry."""
