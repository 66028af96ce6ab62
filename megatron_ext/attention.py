"""Core attention by PyTorch's own kernels."""

import contextlib
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class ScaledDotProductAttention(nn.Module):
    """Causal core attention by torch's scaled_dot_product_attention: no [sequence, sequence] matrix in memory.

    Grouped queries are supported; the head dimension may be split over the tensor-parallel group. Dropout acts on the
    attention weights in training, with other random numbers on each tensor-parallel rank, as each has other heads.

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
        wanted = {
            "context_parallel_size": (config.context_parallel_size, 1),
            "window_size": (config.window_size, None),
            "softmax_type": (config.softmax_type, "vanilla"),
            "attn_mask_type": (attn_mask_type, AttnMaskType.causal),
        }
        for name, (value, supported) in wanted.items():
            if value != supported:
                raise ValueError(f"{name} is {value}; ScaledDotProductAttention computes {supported} only")
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # Under sequence parallelism Megatron-core's block runs all its layers with each rank's own numbers already.
        self.forks_random_numbers = not config.sequence_parallel

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
        dropout = self.dropout if self.training else 0.0
        fork = get_cuda_rng_tracker().fork() if dropout and self.forks_random_numbers else contextlib.nullcontext()
        with fork:
            attended: Tensor = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=dropout,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return attended.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
