"""Forward and backward passes of a step's micro batches, and how their gradients become those of the whole batch.

Two ways: Megatron's schedule leaves whole gradients on every rank, which ZeRO 0 and 1 reduce behind the last micro
batch; ZeRO 2 and 3 reduce and divide them behind every micro batch, so DeepSpeed's engine runs the passes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.deepspeed_compat import accumulated_gradient, finish_backward, forget_skipped_step
from pretrain.parallel import reducing_group
from pretrain.zero import REDUCE_BUCKET


class Passes(Protocol):
    """What the engine asks of either way."""

    def run(self, batches: Sequence[MicroBatch], scale: Tensor | None) -> list[Tensor]:
        """Pass all micro batches through the model, backward too if ``scale``, by which their losses are multiplied.

        Returns:
            fp32 scalars: the unscaled loss sum of each micro batch, on the last pipeline stage; else none.
        """

    def complete_gradients(self) -> None:
        """Reduce what the passes accumulated, so that DeepSpeed can step."""


class SchedulePasses:
    """Megatron's schedule, on any number of pipeline stages; for ZeRO 1."""

    def __init__(self, chunks: Sequence[nn.Module], deepspeed: Any, config: Config) -> None:
        self._chunks, self._deepspeed = list(chunks), deepspeed
        self._round = config.parallel.pp if len(chunks) > 1 else 1
        self._sequence_length, self._micro_batch = config.model.sequence_length, config.train.micro_batch

    def run(self, batches: Sequence[MicroBatch], scale: Tensor | None) -> list[Tensor]:
        """See :class:`Passes`."""
        if scale is not None:
            forget_skipped_step(self._deepspeed)

        def forward_step(batches: Iterator[MicroBatch], module: nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches)
            return _apply(module, batch), partial(_loss_of_schedule, batch, scale)

        # The interleaved schedule takes full rounds only, which evaluation may not have.
        rounds = [*batches, *[_masked(batches[-1])] * (-len(batches) % self._round)]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(rounds) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(rounds),
            seq_length=self._sequence_length,
            micro_batch_size=self._micro_batch,
            forward_only=scale is None,
        )
        return list(results)

    def complete_gradients(self) -> None:
        """See :class:`Passes`."""
        finish_backward(self._deepspeed)
        sum_replicated_gradients(self._chunks)
        self._deepspeed.allreduce_gradients()


class UndividedPasses(SchedulePasses):
    """For ZeRO 0, where DeepSpeed knows of no other data-parallel rank."""

    def complete_gradients(self) -> None:
        """See :class:`Passes`."""
        finish_backward(self._deepspeed)
        sum_replicated_gradients(self._chunks)
        gradients = [accumulated_gradient(parameter) for chunk in self._chunks for parameter in chunk.parameters()]
        average_gradients([gradient for gradient in gradients if gradient is not None])
        self._deepspeed.allreduce_gradients()


class DividedPasses:
    """DeepSpeed's engine, on one pipeline stage; for ZeRO 2 and 3."""

    def __init__(self, chunks: Sequence[nn.Module], deepspeed: Any, config: Config) -> None:
        self._deepspeed = deepspeed
        (chunk,) = chunks
        for parameter in chunk.parameters():
            if parameter.partial_over_tp:  # type: ignore[attr-defined]
                parameter.register_hook(_summed_over_tp)  # type: ignore[no-untyped-call]

    def run(self, batches: Sequence[MicroBatch], scale: Tensor | None) -> list[Tensor]:
        """See :class:`Passes`."""
        if scale is not None:
            forget_skipped_step(self._deepspeed)
        sums = []
        for number, batch in enumerate(batches, start=1):
            if scale is None:
                sums.append(_loss_sum(batch, _apply(self._deepspeed.module, batch)))
                continue
            self._deepspeed.set_gradient_accumulation_boundary(number == len(batches))
            total = _loss_sum(batch, _apply(self._deepspeed, batch))
            self._deepspeed.backward(total * scale)
            sums.append(total.detach())
        return sums

    def complete_gradients(self) -> None:
        """Nothing is left to do."""


PASSES: dict[int, Callable[[Sequence[nn.Module], Any, Config], Passes]] = {
    0: UndividedPasses,
    1: SchedulePasses,
    2: DividedPasses,
    3: DividedPasses,
}
"""By stage of ZeRO."""


def _apply(module: Any, batch: MicroBatch) -> Tensor:
    """Losses of the tokens, [micro_batch, sequence], on the last pipeline stage, else the hidden state."""
    output: Tensor = module(
        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.documents
    )
    return output


def _loss_sum(batch: MicroBatch, per_token: Tensor) -> Tensor:
    return (per_token.float() * batch.loss_mask).sum()


def _loss_of_schedule(batch: MicroBatch, scale: Tensor | None, per_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three values: with two the schedule would divide by the number of micro batches."""
    total = _loss_sum(batch, per_token)
    return total if scale is None else total * scale, batch.loss_mask.sum().int(), total.detach().clone()


def _masked(batch: MicroBatch) -> MicroBatch:
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def sum_replicated_gradients(chunks: Sequence[Any]) -> None:
    """Complete the gradients of parameters that several model-parallel ranks hold whole.

    A parameter that each tp rank applies to its own tokens or heads has a partial sum there. A tied embedding has one
    copy on the first and one on the last stage.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.partial_over_tp:
                _all_reduce_gradient(parameter, parallel_state.get_tensor_model_parallel_group())
        if (
            chunk.share_embeddings_and_output_weights
            and parallel_state.get_pipeline_model_parallel_world_size() > 1
            and (chunk.pre_process or chunk.post_process)
        ):
            _all_reduce_gradient(chunk.shared_embedding_or_output_weight(), parallel_state.get_embedding_group())


def _all_reduce_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    gradient = accumulated_gradient(parameter)
    assert gradient is not None, "a replicated parameter took no part in the step"
    dist.all_reduce(gradient, group=group)


def _summed_over_tp(gradient: Tensor) -> Tensor:
    """A micro batch's gradient over the tensor-parallel ranks, added up in fp32."""
    total = gradient.float() if gradient.dtype != torch.float32 else gradient.clone()
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total.to(gradient.dtype)


def average_gradients(gradients: Sequence[Tensor]) -> None:
    """Replace gradients by their means over the data- and context-parallel ranks, through buffers of limited size."""
    group = reducing_group()
    if group.size() == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        means = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, mean in zip(bucket, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > REDUCE_BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
