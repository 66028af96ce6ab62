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
    """Share of a step's time that a pipeline stage waits, w / (m + w), w = (pp - 1) / vpp (arXiv 2104.04473)."""
    micro_batches = config.train.global_batch // (config.train.micro_batch * dp)
    waited = (config.parallel.pp - 1) / config.parallel.vpp
    return waited / (micro_batches + waited)


def step_flops(config: Config, vocab_size: int) -> int:
    """Model FLOPs of a step over all GPUs."""
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return flops_per_token(model).model * config.train.global_batch * config.model.sequence_length


def step_time(config: Config, parts: StageParts, vocab_size: int, gpus: int, gpu: Gpu, mfu: float) -> StepTime:
    """Time of a step where `mfu` of the peak is reached while a GPU computes."""
    parallel, train = config.parallel, config.train
    dp = gpus // parallel.ranks_of_a_replica
    micro_batches = train.global_batch // (train.micro_batch * dp)
    flops = flops_per_token(dataclasses.replace(config.model, vocab_size=vocab_size))
    rate = gpu.bf16_tflops * 1e12 * mfu
    tokens = train.micro_batch * config.model.sequence_length / parallel.tp
    layers, head = (tokens * f / rate for f in (flops.layers + flops.attention, flops.head))
    again = layers / 3 if config.model.recompute == "full" else 0.0
    # The slowest stage sets the pace: the last one has the head.
    pace = (layers + again) / parallel.pp + head
    model = micro_batches * (layers + head) / parallel.pp
    recompute = micro_batches * again / parallel.pp
    slots = micro_batches + (parallel.pp - 1) / parallel.vpp
    bubble = slots * pace - model - recompute
    tensor = _tensor_seconds(config, gpu) * slots
    data = _data_seconds(config, parts, dp, gpu)
    total = model + recompute + bubble + tensor + data
    return StepTime(model, recompute, bubble, tensor, data, mfu * model / total)


def _tensor_seconds(config: Config, gpu: Gpu) -> float:
    """Of one micro batch in one stage: two all-reduces of the states a layer in each pass, or as much in halves."""
    parallel, model = config.parallel, config.model
    if parallel.tp == 1:
        return 0.0
    passes = 3 if model.recompute == "full" else 2
    states = config.train.micro_batch * model.sequence_length * model.hidden_size * dtype_of(config).itemsize
    sent = 2 * (parallel.tp - 1) / parallel.tp * states
    return model.num_layers / parallel.pp * 2 * passes * sent / _ring_speed(gpu, parallel.tp, 1)


def _data_seconds(config: Config, parts: StageParts, dp: int, gpu: Gpu) -> float:
    """Reducing the fp32 gradients and gathering the weights of the pipeline stage that holds most.

    ZeRO 2 and 3 reduce behind every micro batch, and 3 gathers in front of every pass.
    """
    held = max(parameters_held(config, parts, stage_of(config, dp, rank)) for rank in range(config.parallel.pp))
    micro_batches = config.train.global_batch // (config.train.micro_batch * dp)
    passes = 3 if config.model.recompute == "full" else 2
    size = dtype_of(config).itemsize
    an_element = {
        0: 2 * 4,
        1: 2 * 4 + size,
        2: micro_batches * 2 * 4 + size,
        3: micro_batches * (4 + passes * size),
    }
    sent = (dp - 1) / dp * held * an_element[config.zero.stage]
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
