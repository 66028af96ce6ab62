"""Time of a step, as far as arithmetic tells."""

import dataclasses
from dataclasses import dataclass

from megatron_ext.flops import flops_per_token
from megatron_ext.memory import StageParts
from pretrain.config import Config
from pretrain.hardware import NETWORK_GB, Gpu
from pretrain.plan.memory import dtype_of, parameters_held, stage_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, which add up.

    Attributes:
        model: the model's FLOPs at the stated utilisation.
        recompute: the layers' forward passes a second time.
        bubble: waiting for the pipeline to fill and drain, and for a last stage that has the head besides.
        tensor: all-reduces of tensor parallelism, none hidden.
        data: reducing gradients and gathering weights over the data-parallel ranks, none hidden.
        mfu: model FLOPs over the peak's in the whole step's time.
    """

    model: float
    recompute: float
    bubble: float
    tensor: float
    data: float
    mfu: float

    @property
    def total(self) -> float:
        """The step."""
        return self.model + self.recompute + self.bubble + self.tensor + self.data


def bubble_share(config: Config, dp: int) -> float:
    """Share of a step's time that a pipeline stage waits, (pp - 1) / (m + pp - 1) (arXiv 2104.04473)."""
    micro_batches = config.train.global_batch // (config.train.micro_batch * dp)
    return (config.parallel.pp - 1) / (micro_batches + config.parallel.pp - 1)


def step_flops(config: Config, vocab_size: int) -> int:
    """Model FLOPs of a step over all GPUs."""
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return flops_per_token(model).model * config.train.global_batch * config.model.sequence_length


def step_time(config: Config, parts: StageParts, vocab_size: int, gpus: int, gpu: Gpu, mfu: float) -> StepTime:
    """Time of a step where `mfu` of the peak is reached while a GPU computes."""
    parallel, train = config.parallel, config.train
    dp = gpus // (parallel.tp * parallel.pp)
    micro_batches = train.global_batch // (train.micro_batch * dp)
    flops = flops_per_token(dataclasses.replace(config.model, vocab_size=vocab_size))
    rate = gpu.bf16_tflops * 1e12 * mfu
    tokens = train.micro_batch * config.model.sequence_length / parallel.tp
    layers, head = (tokens * f / rate for f in (flops.layers + flops.attention, flops.head))
    again = {"none": 0.0, "mlp": tokens * flops.mlp / rate / 3, "full": layers / 3}[config.model.recompute]
    # The slowest stage sets the pace: the last one has the head.
    pace = (layers + again) / parallel.pp + head
    model = micro_batches * (layers + head) / parallel.pp
    recompute = micro_batches * again / parallel.pp
    bubble = (micro_batches + parallel.pp - 1) * pace - model - recompute
    tensor = _tensor_seconds(config, gpu) * (micro_batches + parallel.pp - 1)
    data = _data_seconds(config, parts, dp, gpu)
    total = model + recompute + bubble + tensor + data
    return StepTime(model, recompute, bubble, tensor, data, mfu * model / total)


def _tensor_seconds(config: Config, gpu: Gpu) -> float:
    """Of one micro batch in one stage: two all-reduces of the states a layer in each pass, or as much in halves."""
    parallel, model = config.parallel, config.model
    if parallel.tp == 1:
        return 0.0
    passes = {"none": 2.0, "mlp": 2.5, "full": 3.0}[model.recompute]
    states = config.train.micro_batch * model.sequence_length * model.hidden_size * dtype_of(config).itemsize
    sent = 2 * (parallel.tp - 1) / parallel.tp * states
    return model.num_layers / parallel.pp * 2 * passes * sent / _ring_speed(gpu, parallel.tp, 1)


def _data_seconds(config: Config, parts: StageParts, dp: int, gpu: Gpu) -> float:
    """An all-reduce of the fp32 gradients and an all-gather of the weights, of the stage that holds most."""
    held = max(parameters_held(config, parts, stage_of(config, dp, rank)) for rank in range(config.parallel.pp))
    sent = (dp - 1) / dp * held * (2 * 4 + dtype_of(config).itemsize)
    return sent / _ring_speed(gpu, dp, config.parallel.tp)


def _ring_speed(gpu: Gpu, size: int, stride: int) -> float:
    """Bytes/s that each of `size` GPUs, every `stride`-th one, sends in a ring of them.

    A ring over several machines enters and leaves each by the network, over as many of its adapters as it has members
    there, one for each GPU.
    """
    if size * stride <= gpu.per_node:
        return gpu.link_gb * 1e9
    members = max(1, gpu.per_node // stride)
    return min(gpu.link_gb, members * NETWORK_GB) * 1e9
