"""A small model and its batch, shared by the tests."""

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext import Documents, ModelSettings, ParallelSettings, ResidualSettings, build_model, find_documents
from megatron_ext.initialize import OUTPUT_BIAS, cut_for_this_rank, global_names, whole_shape
from megatron_ext.model import transformer_config

VOCAB_SIZE = 200
SEQUENCE = 24
BATCH = 2
GPT2: dict[str, Any] = {
    "positions": "learned",
    "linear_bias": True,
    "normalization": "layernorm",
    "activation": "gelu",
    "tie_embeddings": True,
}
"""GPT-2's choices."""
EOD = 3
PACKINGS: dict[str, tuple[tuple[int, ...], ...]] = {
    "no end at all": ((), ()),
    "ends at the samples' edges": ((SEQUENCE - 1,), (0, SEQUENCE - 2, SEQUENCE - 1)),
    "documents of one token": ((4, 5, 6, 7), (0, 1, 10, 11, 22)),
    "a document over both samples": ((9,), (13,)),
    "lengths that repeat": ((7, 15), (3, 7, 15, 19)),
    "nothing but ends": (tuple(range(SEQUENCE)), tuple(range(SEQUENCE))),
}
"""The places of the end-of-document token in each sample."""
REQUIRED: dict[str, dict[str, Any]] = {"p": {"p": 3.0}}
"""Of the schemes that need more than their name."""


def settings(scheme: str = "geonorm", residual: dict[str, Any] | None = None, **changes: Any) -> ModelSettings:
    """Grouped queries, a vocabulary that needs padding, and weights large enough for large angles."""
    values = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "sequence_length": SEQUENCE,
        "vocab_size": VOCAB_SIZE,
        "init_std": 0.3,
        "residual": ResidualSettings(scheme=scheme, **REQUIRED.get(scheme, {}) | (residual or {})),
    }
    return ModelSettings(**values | changes)


def config(model: ModelSettings, dtype: torch.dtype = torch.float32) -> TransformerConfig:
    return transformer_config(model, ParallelSettings(), dtype)


def token_counts(vocab_size: int = VOCAB_SIZE) -> list[int]:
    return [10_000 // (i + 1) for i in range(vocab_size)]


def build(
    model: ModelSettings,
    parallel: ParallelSettings | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 5,
) -> Any:
    counts = token_counts(model.vocab_size or 0)
    stage = build_model(
        model, parallel or ParallelSettings(), dtype=dtype, device=device, seed=seed, token_counts=counts
    )
    perturb(stage) if device != "meta" else None
    return stage


def perturb(stage: nn.Module) -> None:
    """Move gains and biases off their trivial start, the same way in every layout."""
    with torch.no_grad():
        for name, parameter in global_names(stage).items():
            if parameter.dim() == 1 and name != OUTPUT_BIAS:
                (length,) = whole_shape(name, parameter, VOCAB_SIZE)
                parameter += cut_for_this_rank(
                    0.3 * torch.sin(1 + torch.arange(length, dtype=parameter.dtype)), parameter
                )


def batch(vocab_size: int = VOCAB_SIZE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, labels, position_ids [batch, sequence], and a very uneven weight of each token's loss."""
    generator = torch.Generator().manual_seed(11)
    drawn = torch.randint(0, vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    weights = torch.rand(BATCH, SEQUENCE, generator=generator) ** math.e
    return drawn[:, :-1], drawn[:, 1:], torch.arange(SEQUENCE).expand(BATCH, SEQUENCE), weights


def packed_batch(packing: str, vocab_size: int = VOCAB_SIZE) -> tuple[Tensor, Tensor, Documents, Tensor]:
    """As :func:`batch`, with documents and their position_ids."""
    tokens, labels, _, weights = batch(vocab_size)
    drawn = torch.cat([tokens, labels[:, -1:]], dim=1)
    drawn[drawn == EOD] += 1
    for row, places in enumerate(PACKINGS[packing]):
        drawn[row, list(places)] = EOD
    return drawn[:, :-1], drawn[:, 1:], find_documents(drawn[:, :-1], EOD), weights
