"""What the model eats: micro batches."""

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
