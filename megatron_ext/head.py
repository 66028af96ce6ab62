"""The vocabulary's edge: padding for tensor parallelism, masked logits, the output layer's bias, and the z-loss."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

VOCABULARY_MULTIPLE = 128
"""Rows of the embedding on each tensor-parallel rank are a multiple of this (matrix tiles of the hardware)."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the next multiple of 128 * tp."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def valid_rows(vocab_size: int, rows: int, tp_rank: int) -> int:
    """How many of the `rows` vocabulary rows of one tensor-parallel rank are real tokens; 0 for all padding."""
    return min(rows, max(0, vocab_size - rows * tp_rank))


def log_frequencies(token_counts: Sequence[int], vocab_size: int) -> Tensor:
    """log((count + 1) / (N + V)) of every token, fp64 [vocab_size]; tokens beyond the counts have count 0.

    Raises:
        ValueError: more counts than tokens, or a negative count.
    """
    if len(token_counts) > vocab_size:
        raise ValueError(f"{len(token_counts)} token counts for a vocabulary of {vocab_size}")
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    counts[: len(token_counts)] = torch.as_tensor(token_counts, dtype=torch.float64)
    if (counts < 0).any():
        raise ValueError("token counts must not be negative")
    return torch.log(counts + 1) - torch.log(counts.sum() + vocab_size)


def add_output_bias(output_layer: Any, dtype: torch.dtype) -> None:
    """Give Megatron-core's ColumnParallelLinear a vocabulary-parallel bias, which it then adds and checkpoints itself.

    GPTModel builds its output layer without one and has no argument for it.
    """
    bias = nn.Parameter(torch.zeros(output_layer.output_size_per_partition, dtype=dtype))
    set_tensor_model_parallel_attributes(bias, is_parallel=True, dim=0, stride=1)
    bias.allreduce = True  # type: ignore[attr-defined] # Megatron-core's mark of a parameter outside expert parallelism
    output_layer.bias = bias


def mask_padding(output_layer: Any, vocab_size: int) -> None:
    """Set the logits of padding rows to -inf, so that the loss does not change with the padding, nor with tp.

    A hook and not the bias: -inf inside a parameter would reach the optimizer and the gradient norm.
    """

    def hook(module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        columns = logits.shape[-1]
        # Gathered logits hold the whole vocabulary, otherwise this rank's part.
        tp_rank = 0 if columns == module.output_size else module.tp_group.rank()
        valid = valid_rows(vocab_size, columns, tp_rank)
        if valid < columns:
            padding = torch.arange(columns, device=logits.device) >= valid
            logits = logits.masked_fill(padding, float("-inf"))
        return logits, bias

    output_layer.register_forward_hook(hook)


def cross_entropy_with_z_loss(logits: Tensor, labels: Tensor, coefficient: float) -> Tensor:
    """Cross-entropy of every token, whose gradient is that of cross-entropy + coefficient * log(Z)^2.

    log(Z) = logsumexp of the token's logits (PaLM, arXiv 2204.02311). The two terms share each token's weight, whatever
    the caller makes of the loss, and the value stays comparable between runs with and without the z-loss.

    Args:
        logits: [..., vocabulary / tp], any floating type; overwritten if fp32, as by Megatron-core's own loss. -inf
            counts as absent.
        labels: [...], global token numbers.
        coefficient: of log(Z)^2.

    Returns:
        [...], fp32 (fp64 for fp64 logits), the same on every tensor-parallel rank.
    """
    losses: Tensor = _CrossEntropyWithZLoss.apply(logits, labels, coefficient)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropyWithZLoss(torch.autograd.Function):
    """Megatron-core's vocabulary-parallel cross-entropy, with the gradient's softmax scaled by 1 + 2 c log(Z)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, coefficient: float) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        columns = logits.shape[-1]
        first = columns * parallel_state.get_tensor_model_parallel_rank()
        elsewhere, columns_of_labels, label_logits, sums, exponentials = (
            VocabParallelCrossEntropy.calculate_predicted_logits(logits, labels, largest, first, first + columns)
        )
        dist.all_reduce(label_logits, group=group)
        dist.all_reduce(sums, group=group)
        softmax, losses = VocabParallelCrossEntropy.calculate_cross_entropy_loss(exponentials, label_logits, sums)
        scale = 1 + 2 * coefficient * (largest + sums.log())
        ctx.save_for_backward(softmax, elsewhere, columns_of_labels, scale)
        result: Tensor = losses
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        softmax, elsewhere, columns_of_labels, scale = ctx.saved_tensors
        softmax.mul_(scale.unsqueeze(-1))
        rows, numbers, here, gradient = VocabParallelCrossEntropy.prepare_gradient_calculation_operands(
            softmax, elsewhere
        )
        return (
            VocabParallelCrossEntropy.calculate_gradients(
                rows, numbers, columns_of_labels, here, gradient, upstream[0]
            ),
            None,
            None,
        )
