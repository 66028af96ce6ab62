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
