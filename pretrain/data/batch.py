"""What the model eats: one micro batch."""

from dataclasses import dataclass, replace

import torch

from megatron_ext import Documents, find_documents


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together.

    Attributes:
        tokens: int64 ``[micro_batch, sequence]``.
        labels: int64 ``[micro_batch, sequence]``, the token that follows each one.
        loss_mask: float32 ``[micro_batch, sequence]``, 1 where the label counts, 0 where it does not.
        documents: within which to attend and to count positions; None does both over whole samples.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    documents: Documents | None = None

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 ``[micro_batch, sequence]``: the place of each token in its document, or in its sample."""
        if self.documents is not None:
            return self.documents.position_ids
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    def with_documents(self, eod_id: int) -> "MicroBatch":
        """The same micro batch, on the CPU, divided into documents behind each token ``eod_id``.

        The loss stays that of all tokens: an end of document still predicts the token behind it. So losses with and
        without documents are means over the same tokens, and the model learns how a document begins.
        """
        return replace(self, documents=find_documents(self.tokens, eod_id))

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro batch with its tensors on ``device``; copies run beside the computation."""
        tokens, labels, loss_mask = (
            tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.labels, self.loss_mask)
        )
        return MicroBatch(tokens, labels, loss_mask, self.documents and self.documents.to(device))
