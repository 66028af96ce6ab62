"""What the model eats: one micro batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together.

    Attributes:
        tokens: int64 ``[micro_batch, sequence]``.
        labels: int64 ``[micro_batch, sequence]``, the token that follows each one.
        loss_mask: float32 ``[micro_batch, sequence]``, 1 where the label counts, 0 where it does not.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro batch with its tensors on ``device``; copies run beside the computation."""
        moved = (tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.labels, self.loss_mask))
        return MicroBatch(*moved)
