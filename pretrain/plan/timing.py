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
        recompute: forward passes of the layers, or of their MLPs, a second time.
        bubble: waiting for the pipeline to fill and drain, and for a last stage that has the head besides.
        tensor: all-reduces of tensor parallelism, none hidden.
        context: gathering keys and values over the context-parallel ranks and reducing their gradients, none hidden.
        data: reducing gradients and gathering weights over the data-parallel ranks, none hidden.
        mfu: model FLOPs over the peak's in the whole step's time.
    """

    model: float
    recompute: float
    bubble: float
    tensor: float
    context: float
    data: float
    mfu: float

    @property
    def total(self) -> float:
        """The step."""
        return self.model + self.recompute + self.bubble + self.tensor + self.context + self.data


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
    tokens = train.micro_batch * config.model.sequence_length / (parallel.tp * parallel.cp)
    layers, head = (tokens * f / rate for f in (flops.layers + flops.attention, flops.head))
    mlp = flops.mlp / (flops.layers + flops.attention)
    again = layers / 3 * {"none": 0.0, "selective": mlp, "full": 1.0}[config.model.recompute]
    # The slowest stage sets the pace: the last one has the head.
    pace = (layers + again) / parallel.pp + head
    model = micro_batches * (layers + head) / parallel.pp
    recompute = micro_batches * again / parallel.pp
    slots = micro_batches + (parallel.pp - 1) / parallel.vpp
    bubble = slots * pace - model - recompute
    tensor = _tensor_seconds(config, gpu) * slots
    context = _context_seconds(config, gpu) * slots
    data = _data_seconds(config, parts, dp, gpu)
    total = model + recompute + bubble + tensor + context + data
    return StepTime(model, recompute, bubble, tensor, context, data, mfu * model / total)


def _tensor_seconds(config: Config, gpu: Gpu) -> float:
    """Of one micro batch in one stage: two all-reduces of the states a layer in each pass, or as much in halves."""
    parallel, model = config.parallel, config.model
    if parallel.tp == 1:
        return 0.0
    passes = {"none": 2, "selective": 2.5, "full": 3}[model.recompute]
    tokens = config.train.micro_batch * model.sequence_length / parallel.cp
    states = tokens * model.hidden_size * dtype_of(config).itemsize
    sent = 2 * (parallel.tp - 1) / parallel.tp * states
    return model.num_layers / parallel.pp * 2 * passes * sent / _ring_speed(gpu, parallel.tp, 1)


def _context_seconds(config: Config, gpu: Gpu) -> float:
    """Of one micro batch in one stage: keys and values are gathered in each forward pass, their gradients scattered."""
    parallel, model = config.parallel, config.model
    if parallel.cp == 1:
        return 0.0
    passes = 3 if model.recompute == "full" else 2
    groups = model.num_query_groups or model.num_attention_heads
    width = 2 * groups * model.hidden_size / model.num_attention_heads / parallel.tp
    states = config.train.micro_batch * model.sequence_length * width * dtype_of(config).itemsize
    sent = (parallel.cp - 1) / parallel.cp * states
    return model.num_layers / parallel.pp * passes * sent / _ring_speed(gpu, parallel.cp, parallel.tp)


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
    sharing = dp * config.parallel.cp
    sent = (sharing - 1) / sharing * held * an_element[config.zero.stage]
    return sent / _ring_speed(gpu, sharing, config.parallel.tp)


def _ring_speed(gpu: Gpu, size: int, stride: int) -> float:
    """Bytes/s that each of `size` GPUs, every `stride`-th one, sends in a ring of them.

    A ring over several machines enters and leaves each by the network, over as many of its adapters as it has members
    there, one for each GPU.
    """
    if size * stride <= gpu.per_node:
        return gpu.link_gb * 1e9
    members = max(1, gpu.per_node // stride)
    return min(gpu.link_gb, members * NETWORK_GB) * 1e9
