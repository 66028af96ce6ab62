"""Where the documents of a micro batch lie, so that each can be a sequence of its own."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a micro batch [batch, sequence], one sample after another; n documents in all.

    A sample's first token begins a document, as does each token behind an end-of-document token, so a document that
    is spread over several samples counts in each as one of its own.

    A model that is given it as Megatron-core's ``packed_seq_params`` passes it on to every layer's attention, in
    recomputation too. It is no PackedSeqParams: samples keep their own rows, in a tensor of the usual shape.

    Attributes:
        lengths: int64 [n], tokens of each; always on the CPU, where it is read without waiting for a GPU.
        cu_seqlens: int32 [n + 1], the token at which each begins, and the number of all tokens.
        position_ids: int64 [batch, sequence], each token's place in its document.
    """

    lengths: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor

    qkv_format: ClassVar[str] = "sbhd"
    """Megatron-core's name for tensors [sequence, batch, heads, head_dim]; ``thd`` would make it drop the batch."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths.max())

    @cached_property
    def rows_by_length(self) -> list[Tensor]:
        """Token numbers, int64 [documents of one length, that length], for every length that occurs.

        There are fewer than sqrt(2 tokens) of them, for lengths that differ add up to the number of tokens at most.
        """
        starts = self.lengths.cumsum(0) - self.lengths
        rows = [starts[self.lengths == size, None] + torch.arange(size) for size in torch.unique(self.lengths).tolist()]
        return [group.to(self.cu_seqlens.device) for group in rows]

    @cached_property
    def places(self) -> Tensor:
        """Where each token stands in :attr:`rows_by_length` put one behind another; int64 [tokens]."""
        return torch.argsort(torch.cat([group.flatten() for group in self.rows_by_length]))

    def to(self, device: torch.device) -> "Documents":
        """The same documents for tensors on ``device``."""
        cu_seqlens, position_ids = (t.to(device, non_blocking=True) for t in (self.cu_seqlens, self.position_ids))
        return Documents(self.lengths, cu_seqlens, position_ids)


def find_documents(tokens: Tensor, eod_id: int) -> Documents:
    """Divide samples behind each end-of-document token, which belongs to the document that it ends.

    Args:
        tokens: int64 [batch, sequence] on the CPU.
        eod_id: the end-of-document token.
    """
    begins = F.pad(tokens[:, :-1] == eod_id, (1, 0), value=True)
    starts = begins.flatten().nonzero().squeeze(1)
    ends = F.pad(starts, (0, 1), value=tokens.numel())
    lengths = ends.diff()
    positions = torch.arange(tokens.numel()) - starts.repeat_interleave(lengths)
    return Documents(lengths, ends.int(), positions.view_as(tokens))
