"""Context parallelism: a sample's tokens over several ranks, each of which attends with its own to all before them.

A sample of S tokens is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r, so that all ranks have as much
to attend to (zig-zag, as in Megatron-core). Keys and values are gathered; what a query may see is decided by its place
in the whole sample. Works on torch's own attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from megatron_ext.documents import Documents

Attend = Callable[..., Tensor]
"""(query, key, value, *, attn_mask), each [n, heads or groups, length, head_dim], gives the mixed values."""


def chunks_of(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """The two chunks of a sample, of 2 cp_size, that a rank holds."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def own_part(tensor: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """A rank's tokens of [batch, sequence, ...]; the sequence is a multiple of 2 cp_size."""
    chunks = tensor.chunk(2 * cp_size, dim=1)
    return torch.cat([chunks[chunk] for chunk in chunks_of(cp_rank, cp_size)], dim=1)


@dataclass(frozen=True, eq=False)
class DocumentRuns:
    """A rank's part of a micro batch [batch, sequence / cp] in runs: neighbouring tokens of one document in one chunk.

    Takes the place of :class:`Documents` where there are several context-parallel ranks. Queries are counted sample
    after sample on this rank, keys sample after sample in the whole micro batch.

    Attributes:
        query_lengths: int64 [n], tokens of each run, on the CPU.
        key_lengths: int64 [n], tokens of its document from the first up to the end of the run, on the CPU.
        key_rows: int64 [sum of key_lengths], these tokens, run after run.
        position_ids: int64 [batch, sequence / cp], each token's place in its document.
    """

    query_lengths: Tensor
    key_lengths: Tensor
    key_rows: Tensor
    position_ids: Tensor

    qkv_format: ClassVar[str] = "sbhd"
    """As of :class:`Documents`."""

    @cached_property
    def by_lengths(self) -> list[tuple[Tensor, Tensor]]:
        """Query numbers [runs, query length] and key numbers [runs, key length] for every pair of lengths."""
        queries = self.query_lengths.cumsum(0) - self.query_lengths
        keys = self.key_lengths.cumsum(0) - self.key_lengths
        pairs = torch.stack([self.query_lengths, self.key_lengths], dim=1)
        device = self.key_rows.device
        found = []
        for pair in torch.unique(pairs, dim=0):
            chosen = (pairs == pair).all(1)
            query_rows = queries[chosen, None] + torch.arange(int(pair[0]))
            key_rows = keys[chosen, None] + torch.arange(int(pair[1]))
            found.append((query_rows.to(device), self.key_rows[key_rows.to(device)]))
        return found

    @cached_property
    def places(self) -> Tensor:
        """Where each query stands in :attr:`by_lengths` put one behind another; int64 [tokens]."""
        return torch.argsort(torch.cat([rows.flatten() for rows, _ in self.by_lengths]))

    def to(self, device: torch.device) -> "DocumentRuns":
        """The same runs for tensors on ``device``."""
        key_rows, position_ids = (t.to(device, non_blocking=True) for t in (self.key_rows, self.position_ids))
        return DocumentRuns(self.query_lengths, self.key_lengths, key_rows, position_ids)


def find_runs(documents: Documents, cp_rank: int, cp_size: int) -> DocumentRuns:
    """The runs of one rank; ``documents`` are on the CPU."""
    batch, sequence = documents.position_ids.shape
    chunk_length = sequence // (2 * cp_size)
    ends = documents.lengths.cumsum(0)
    starts = ends - documents.lengths
    queries, keys, rows = [], [], []
    for sample in range(batch):
        for chunk in chunks_of(cp_rank, cp_size):
            first = sample * sequence + chunk * chunk_length
            last = first + chunk_length
            there = (ends > first) & (starts < last)
            stops = ends[there].clamp(max=last)
            queries.append(stops - starts[there].clamp(min=first))
            keys.append(stops - starts[there])
            rows += [
                torch.arange(start, stop) for start, stop in zip(starts[there].tolist(), stops.tolist(), strict=True)
            ]
    position_ids = own_part(documents.position_ids, cp_rank, cp_size)
    return DocumentRuns(torch.cat(queries), torch.cat(keys), torch.cat(rows), position_ids)


def gather_keys(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of whole samples in their order, [sequence, batch, groups, head_dim], from each rank's part.

    One collective; its backward pass sums the gradients that the ranks have for one another's keys.
    """
    size = group.size()
    width = key.shape[-1]
    gathered = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1).contiguous(), group=group)
    chunks = gathered.chunk(2 * size)
    # Rank i brings chunks i and 2 cp - 1 - i.
    places = {chunk: 2 * i + half for i in range(size) for half, chunk in enumerate(chunks_of(i, size))}
    whole = torch.cat([chunks[places[chunk]] for chunk in range(2 * size)])
    return whole[..., :width], whole[..., width:]


def attend_by_chunk(query: Tensor, key: Tensor, value: Tensor, cp_rank: int, cp_size: int, attend: Attend) -> Tensor:
    """Causal attention of this rank's two chunks to whole samples.

    Args:
        query: [sequence / cp, batch, heads, head_dim].
        key: [sequence, batch, groups, head_dim].
        value: as key.
        cp_rank, cp_size: of the context-parallel group.
        attend: see :data:`Attend`.

    Returns:
        As query.
    """
    length = query.shape[0] // 2
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    parts = []
    for half, chunk in enumerate(chunks_of(cp_rank, cp_size)):
        seen = (chunk + 1) * length
        own = q[:, :, half * length : (half + 1) * length]
        parts.append(attend(own, k[:, :, :seen], v[:, :, :seen], attn_mask=_lower_right(length, seen)))
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3)


def attend_by_run(query: Tensor, key: Tensor, value: Tensor, runs: DocumentRuns, attend: Attend) -> Tensor:
    """Attention within documents on any device, by one call for each pair of lengths that occurs.

    Args:
        query: [tokens on this rank, heads, head_dim], sample after sample.
        key: [tokens, groups, head_dim], sample after sample.
        value: as key.
        runs: of this rank.
        attend: see :data:`Attend`.

    Returns:
        As query.
    """
    parts = []
    for query_rows, key_rows in runs.by_lengths:
        q, k, v = (
            tensor[rows].transpose(1, 2) for tensor, rows in ((query, query_rows), (key, key_rows), (value, key_rows))
        )
        mask = _lower_right(query_rows.shape[1], key_rows.shape[1])
        parts.append(attend(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[runs.places]


def _lower_right(queries: int, keys: int) -> Tensor:
    """torch's causal_lower_right(queries, keys), which is asked for its numbers alone, without a tensor of that size.

    torch's own takes 8 bytes for every pair, and cannot be made where a dispatch mode counts tensors.
    """
    mask: Any = Tensor._make_subclass(CausalBias, torch.empty(0))
    mask.variant, mask.seq_len_q, mask.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
    return mask  # type: ignore[no-any-return]


def bounds_of(lengths: Tensor, device: torch.device) -> Tensor:
    """int32 [n + 1]: where each of the runs begins, and the end of the last."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().to(device, non_blocking=True)
