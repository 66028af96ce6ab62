"""What the model eats: micro batches."""

from dataclasses import dataclass, replace

import torch

from megatron_ext import DocumentRuns, Documents, find_documents, find_runs, own_part


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together.

    Attributes:
        tokens: int64 ``[micro_batch, sequence]``.
        labels: int64 ``[micro_batch, sequence]``, the token that follows each one.
        loss_mask: float32 ``[micro_batch, sequence]``, 1 where the label counts, 0 where it does not.
        documents: within which to attend and to count positions; None does both over whole samples.
        places: int64 ``[sequence]``, of the tokens in their samples where these are parts of samples; None for all.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    documents: Documents | DocumentRuns | None = None
    places: torch.Tensor | None = None

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 ``[micro_batch, sequence]``: the place of each token in its document, or in its sample."""
        if self.documents is not None:
            return self.documents.position_ids
        if self.places is not None:
            return self.places.expand_as(self.tokens)
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    def with_documents(self, eod_id: int) -> "MicroBatch":
        """The same micro batch, on the CPU, divided into documents behind each token ``eod_id``.

        The loss stays that of all tokens: an end of document still predicts the token behind it. So losses with and
        without documents are means over the same tokens, and the model learns how a document begins.
        """
        return replace(self, documents=find_documents(self.tokens, eod_id))

    def part_of(self, cp_rank: int, cp_size: int) -> "MicroBatch":
        """The tokens of every sample that one context-parallel rank holds, on the CPU where there are documents."""
        tokens, labels, loss_mask, places = (
            own_part(tensor, cp_rank, cp_size)
            for tensor in (self.tokens, self.labels, self.loss_mask, torch.arange(self.tokens.shape[1])[None])
        )
        documents = self.documents
        if isinstance(documents, Documents):
            documents = find_runs(documents, cp_rank, cp_size)
        return MicroBatch(tokens, labels, loss_mask, documents, places[0])

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro batch with its tensors on ``device``; copies run beside the computation."""
        tokens, labels, loss_mask = (
            tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.labels, self.loss_mask)
        )
        documents = self.documents and self.documents.to(device)
        places = None if self.places is None else self.places.to(device, non_blocking=True)
        return MicroBatch(tokens, labels, loss_mask, documents, places)


def micro_batches(tokens: torch.Tensor, sound: torch.Tensor, micro_batch: int) -> list[MicroBatch]:
    """Cut samples into micro batches; bad ones are masked wholly.

    Args:
        tokens: int64 ``[n * micro_batch, sequence + 1]``.
        sound: bool ``[n * micro_batch]``, on the same device.
        micro_batch: samples of one.
    """
    mask = sound.float()[:, None].expand(-1, tokens.shape[1] - 1)
    return [
        MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), loss_mask.contiguous())
        for part, loss_mask in zip(torch.split(tokens, micro_batch), torch.split(mask, micro_batch), strict=True)
    ]
