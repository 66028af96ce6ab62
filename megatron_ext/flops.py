"""Floating-point operations of a model, a multiply-add as two."""

from dataclasses import dataclass

from megatron_ext.schemes import scheme_of
from megatron_ext.settings import ModelSettings

CONVENTION = (
    "a token 6 x parameters in matrices (no embedding) + 12 x layers x hidden size x sequence, as PaLM counts MFU",
    "(arXiv 2204.02311, appendix B): attention as if not causal, nothing for recomputation, norms and residual steps",
)
"""How model FLOPs, and so model FLOPs utilisation (MFU), are counted, in two lines."""


@dataclass(frozen=True)
class Flops:
    """Forward and backward FLOPs per token, the backward pass as two forward ones.

    Attributes:
        layers: matrices of attention and MLP.
        mlp: of these, the MLP's.
        head: the output layer.
        attention: scores and weighted values.
        residual: norms and steps of the residual scheme; element by element, so no part of :attr:`model`.
    """

    layers: int
    mlp: int
    head: int
    attention: int
    residual: int

    @property
    def model(self) -> int:
        """What MFU counts, see :data:`CONVENTION`."""
        return self.layers + self.head + self.attention


def flops_per_token(model: ModelSettings) -> Flops:
    """FLOPs of one token in training.

    Raises:
        ValueError: no `vocab_size`, or an unknown scheme.
    """
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is not set")
    hidden, layers = model.hidden_size, model.num_layers
    groups = model.num_query_groups or model.num_attention_heads
    key_value = 2 * groups * (hidden // model.num_attention_heads)
    mlp = (3 if model.activation == "swiglu" else 2) * model.ffn_hidden_size
    return Flops(
        layers=6 * layers * hidden * (2 * hidden + key_value + mlp),
        mlp=6 * layers * hidden * mlp,
        head=6 * hidden * model.vocab_size,
        attention=12 * layers * hidden * model.sequence_length,
        residual=3 * layers * scheme_of(model.residual).flops(hidden),
    )
