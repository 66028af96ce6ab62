"""Norms built the way Megatron-core builds them, and usable with sequence parallelism."""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


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
