"""Core attention by PyTorch's own kernels."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from megatron_ext.documents import Documents

# What the kernels of flash attention take.
_FLASH_HEAD_DIM, _FLASH_HEAD_DIM_MULTIPLE = 256, 8


class ScaledDotProductAttention(nn.Module):
    """Causal core attention by torch's fused kernels: no [sequence, sequence] matrix in memory.

    Grouped queries are supported, and documents that see nothing of one another; the head dimension may be split over
    the tensor-parallel group. Dropout acts on the attention weights in training, with other random numbers on each
    tensor-parallel rank, as each has other heads.

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
            packed_seq_params: :class:`Documents`, within which to attend; None attends over whole samples.

        Returns:
            [sequence, batch, heads * head_dim].

        Raises:
            ValueError: other packing, an attention bias, or a key of another length (a key/value cache).
        """
        packed = packed_seq_params is not None and not isinstance(packed_seq_params, Documents)
        if packed or attention_bias is not None or key.shape[0] != query.shape[0]:
            raise ValueError("ScaledDotProductAttention takes whole sequences or Documents: no bias, cache or packing")
        if value.untyped_storage()._cdata != key.untyped_storage()._cdata:
            # Queries and keys were turned or normed since: a view would keep what they were before, too.
            value = value.contiguous()
        dropout = self.dropout if self.training else 0.0
        attend = partial(
            F.scaled_dot_product_attention,
            dropout_p=dropout,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        fork = get_cuda_rng_tracker().fork() if dropout and self.forks_random_numbers else contextlib.nullcontext()
        with fork:
            if packed_seq_params is None:
                attended = attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))).permute(2, 0, 1, 3)
            elif flash_can_attend(query.device, query.dtype, query.shape[-1], dropout):
                attended = attend_by_flash(query, key, value, packed_seq_params, self.softmax_scale)
            else:
                attended = attend_by_length(query, key, value, packed_seq_params, attend)
        return attended.reshape(*query.shape[:2], -1)


def flash_can_attend(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether torch's variable-length attention computes this; a GPU that has bf16 has its kernels too."""
    fits = head_dim <= _FLASH_HEAD_DIM and head_dim % _FLASH_HEAD_DIM_MULTIPLE == 0
    return device.type == "cuda" and dtype == torch.bfloat16 and fits and not dropout


def attend_by_flash(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None) -> Tensor:
    """Causal attention within documents, all of them in one kernel.

    Args:
        query: [sequence, batch, heads, head_dim].
        key: [sequence, batch, groups, head_dim].
        value: as key.
        documents: of the batch.
        scale: of the scores; None is 1 / sqrt(head_dim).

    Returns:
        As query.
    """
    bounds, longest = documents.cu_seqlens, documents.longest
    attended = varlen_attn(
        _token_by_token(query),
        _token_by_token(key),
        _token_by_token(value),
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[2] != key.shape[2],
    )
    assert isinstance(attended, Tensor)
    return _as_batch(attended, query)


def attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, attend: Callable[..., Tensor]
) -> Tensor:
    """Attention within documents on any device, by one call for each length of document that occurs.

    Args:
        query: [sequence, batch, heads, head_dim].
        key: [sequence, batch, groups, head_dim].
        value: as key.
        documents: of the batch.
        attend: (query, key, value), each [documents, heads or groups, length, head_dim], gives the mixed values.

    Returns:
        As query.
    """
    tokens = [_token_by_token(tensor) for tensor in (query, key, value)]
    parts = []
    for rows in documents.rows_by_length:
        attended = attend(*(tensor[rows].transpose(1, 2) for tensor in tokens))
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return _as_batch(torch.cat(parts)[documents.places], query)


def _token_by_token(tensor: Tensor) -> Tensor:
    """[sequence, batch, ...] as [tokens, ...], sample after sample."""
    return tensor.transpose(0, 1).flatten(0, 1)


def _as_batch(tokens: Tensor, like: Tensor) -> Tensor:
    """The opposite of :func:`_token_by_token`."""
    return tokens.view(like.shape[1], like.shape[0], *tokens.shape[1:]).transpose(0, 1)
