"""Core attention by PyTorch's own kernels."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from megatron_ext.context import Attend, DocumentRuns, attend_by_chunk, attend_by_run, bounds_of, gather_keys, own_part
from megatron_ext.documents import Documents
from megatron_ext.kernels.eager import compute_dtype

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
            "window_size": (config.window_size, None),
            "softmax_type": (config.softmax_type, "vanilla"),
            "attn_mask_type": (attn_mask_type, AttnMaskType.causal),
        }
        for name, (value, supported) in wanted.items():
            if value != supported:
                raise ValueError(f"{name} is {value}; ScaledDotProductAttention computes {supported} only")
        self.softmax_scale = softmax_scale
        self.cp_group: Any = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.layer_number = layer_number
        self.observer: Callable[[ScaledDotProductAttention, Tensor, Tensor, Any], None] | None = None
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

        With context parallelism the sequence is this rank's part of the sample, and :mod:`megatron_ext.context` tells
        which.

        Args:
            query: [sequence, batch, heads, head_dim].
            key: [sequence, batch, groups, head_dim]; heads is a multiple of groups.
            value: as key.
            packed_seq_params: :class:`Documents`, within which to attend; None attends over whole samples. With context
                parallelism :class:`megatron_ext.context.DocumentRuns` instead.

        Returns:
            [sequence, batch, heads * head_dim].

        Raises:
            ValueError: other packing, an attention bias, or a key of another length (a key/value cache).
        """
        packed = not isinstance(packed_seq_params, (DocumentRuns if self.cp_group else Documents) | None)
        if packed or attention_bias is not None or key.shape[0] != query.shape[0]:
            raise ValueError("ScaledDotProductAttention takes whole sequences or Documents: no bias, cache or packing")
        if self.cp_group is not None:
            key, value = gather_keys(key, value, self.cp_group)
        if key.is_contiguous():
            # It was turned or normed, and so were the queries: a view of all three would keep what they were, too.
            value = value.contiguous()
        if self.observer is not None:
            self.observer(self, query, key, packed_seq_params)
        dropout = self.dropout if self.training else 0.0
        attend = partial(
            F.scaled_dot_product_attention,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        fork = get_cuda_rng_tracker().fork() if dropout and self.forks_random_numbers else contextlib.nullcontext()
        flash = flash_can_attend(query.device, query.dtype, query.shape[-1], dropout)
        with fork:
            if self.cp_group is not None:
                attended = self._attend_over_ranks(query, key, value, packed_seq_params, attend, flash)
            elif packed_seq_params is None:
                states = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
                attended = attend(*states, is_causal=True).permute(2, 0, 1, 3)
            elif flash:
                attended = attend_by_flash(query, key, value, packed_seq_params, self.softmax_scale)
            else:
                attended = attend_by_length(query, key, value, packed_seq_params, partial(attend, is_causal=True))
        return attended.reshape(*query.shape[:2], -1)

    def places_in(self, sequence: int, device: torch.device) -> Tensor:
        """Where this rank's tokens stand in a sample of so many; int64 [sequence / cp]."""
        places = torch.arange(sequence, device=device)
        if self.cp_group is None:
            return places
        return own_part(places[None], self.cp_group.rank(), self.cp_group.size())[0]

    def _attend_over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, runs: DocumentRuns | None, attend: Attend, flash: bool
    ) -> Tensor:
        """This rank's queries against keys and values of whole samples; else see :meth:`forward`."""
        if runs is None:
            return attend_by_chunk(query, key, value, self.cp_group.rank(), self.cp_group.size(), attend)
        q, k, v = (_token_by_token(tensor) for tensor in (query, key, value))
        if flash:
            return _as_batch(attend_runs_by_flash(q, k, v, runs, self.softmax_scale), query)
        return _as_batch(attend_by_run(q, k, v, runs, attend), query)


def largest_logit(
    query: Tensor, key: Tensor, places: Tensor, position_ids: Tensor, scale: float | None = None, rows: int = 512
) -> Tensor:
    """The largest scaled query-key product that the softmax of the first sample sees, over all heads.

    Args:
        query: [queries, batch, heads, head_dim], of a whole sample or a part of it.
        key: [sequence, batch, groups, head_dim], of the whole sample.
        places: int64 [queries], where each query stands in the sample, rising.
        position_ids: int64 [queries], where it stands in its document, within which it attends.
        scale: of the products; None is 1 / sqrt(head_dim).
        rows: of the matrix [queries, sequence] that are in memory at once.

    Returns:
        Scalar, fp32 (fp64 for fp64 inputs).
    """
    first_query, first_key = (tensor[:, 0].to(compute_dtype(tensor)).transpose(0, 1) for tensor in (query, key))
    first_key = first_key.repeat_interleave(len(first_query) // len(first_key), dim=0).transpose(1, 2)
    key_places = torch.arange(key.shape[0], device=key.device)
    largest = first_query.new_full((), -float("inf"))
    for start in range(0, len(places), rows):
        block = slice(start, start + rows)
        last = places[block, None]
        products = first_query[:, block] @ first_key
        seen = (key_places <= last) & (key_places >= last - position_ids[block, None])
        largest = torch.maximum(largest, products.masked_fill(~seen, -float("inf")).max())
    return largest * (scale if scale is not None else query.shape[-1] ** -0.5)


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


def attend_runs_by_flash(query: Tensor, key: Tensor, value: Tensor, runs: DocumentRuns, scale: float | None) -> Tensor:
    """As :func:`megatron_ext.context.attend_by_run`, in one kernel, which aligns queries and keys at their ends.

    Args:
        query, key, value, runs: as there.
        scale: of the scores; None is 1 / sqrt(head_dim).
    """
    attended = varlen_attn(
        query,
        key[runs.key_rows],
        value[runs.key_rows],
        bounds_of(runs.query_lengths, query.device),
        bounds_of(runs.key_lengths, query.device),
        int(runs.query_lengths.max()),
        int(runs.key_lengths.max()),
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


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
