"""Memory of one rank of a run."""

from dataclasses import dataclass

import torch

from megatron_ext.memory import StageParts
from pretrain.config import Config
from pretrain.zero import GATHERED, REDUCE_BUCKET

RUNTIME_BYTES = 2 * 2**30
"""CUDA's context, NCCL's channels, kernels and their workspaces: an assumption."""

USABLE = 0.92
"""Share of a GPU that tensors can fill; the rest is lost between blocks of the allocator: an assumption."""

_COPIED = 500_000_000
"""Elements up to which DeepSpeed 0.19.8 copies gradient buffers into one to reduce it, in bf16 at ZeRO 0 and 1."""

ZERO_DIVIDES = {"optimizer": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which a kind is divided over the data-parallel ranks (arXiv 1910.02054)."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage of a layout.

    Attributes:
        pp_rank: from 0.
        layers: that it holds.
        in_flight: micro batches whose activations it holds at once, under 1F1B (arXiv 2104.04473); with virtual stages,
            of which it holds more, a multiple of 1/vpp.
        is_last: whether it has the head.
    """

    pp_rank: int
    layers: int
    in_flight: float
    is_last: bool


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: in the training precision.
        gradients: fp32.
        optimizer: fp32 masters and both moments of AdamW; 0 where they are in host memory.
        activations: kept for backward passes, over the micro batches in flight.
        work: at the most beyond them: logits and loss, or one layer (with recomputation all that it recomputes).
        buffers: pipeline messages and what ZeRO 2 and 3 reduce and gather in; or, at the step, when no activations are
            there, DeepSpeed's copy of the gradients.
        runtime: :data:`RUNTIME_BYTES`.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    work: int
    buffers: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        """All of it."""
        kinds = (self.weights, self.gradients, self.optimizer, self.activations, self.work, self.buffers, self.runtime)
        return sum(kinds)


def stage_of(config: Config, dp: int, pp_rank: int) -> Stage:
    """What a pipeline rank holds."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    micro_batches = config.train.global_batch // (config.train.micro_batch * dp)
    in_flight = float(pp - pp_rank)
    if vpp > 1:
        in_flight = (2 * (pp - pp_rank - 1) + (vpp - 1) * pp + 1) / vpp
    return Stage(pp_rank, config.model.num_layers // pp, min(in_flight, micro_batches), pp_rank == pp - 1)


def parameters_held(config: Config, parts: StageParts, stage: Stage) -> int:
    """Parameters on one rank of the stage."""
    held = (parts.layer * stage.layers).held
    if stage.pp_rank == 0:
        held += parts.embedding.held
    if stage.is_last:
        held += parts.head.held
        if config.parallel.pp > 1:
            held += parts.tied.held
    return held


def model_parameters(config: Config, parts: StageParts) -> int:
    """Parameters of the whole model, each once, padding of the vocabulary included."""
    return (parts.embedding + parts.layer * config.model.num_layers + parts.head).whole(config.parallel.tp)


def persistent_bytes(held: int, sharing: int, zero_stage: int, precision: str) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state of `held` parameters, which ZeRO divides over `sharing` ranks."""
    sizes = {"weights": 2 if precision == "bf16" else 4, "gradients": 4, "optimizer": 12}
    weights, gradients, optimizer = (
        -(-size * held // (sharing if zero_stage >= ZERO_DIVIDES[kind] else 1)) for kind, size in sizes.items()
    )
    return weights, gradients, optimizer


def rank_memory(config: Config, parts: StageParts, dp: int, pp_rank: int) -> Memory:
    """Memory of a rank of pipeline stage `pp_rank` at its peak.

    Args:
        parts: of the config's model, tp, sp, cp and micro batch.
        dp: data-parallel ranks.
    """
    stage = stage_of(config, dp, pp_rank)
    held = parameters_held(config, parts, stage)
    sharing = dp * config.parallel.cp
    weights, gradients, optimizer = persistent_bytes(held, sharing, config.zero.stage, config.train.precision)
    saved = stage.layers * parts.layer_saved + (parts.embedding_saved if pp_rank == 0 else 0)
    activations = round(stage.in_flight * saved)
    work = max(parts.layer_work, parts.head_work) if stage.is_last else parts.layer_work
    if config.zero.offload_optimizer:
        optimizer = 0
    buffers = _pipeline_bytes(config, stage) + _zero_bytes(config, held)
    # The step comes after the last backward pass: the larger of both needs counts.
    buffers += max(0, _bytes_at_the_step(config, held, sharing) - activations - work - buffers)
    return Memory(weights, gradients, optimizer, activations, work, buffers)


def fullest(config: Config, parts: StageParts, dp: int) -> tuple[int, Memory]:
    """Pipeline rank that needs most, and its memory."""
    ranks = [(pp_rank, rank_memory(config, parts, dp, pp_rank)) for pp_rank in range(config.parallel.pp)]
    return max(ranks, key=lambda rank: rank[1].total)


def dtype_of(config: Config) -> torch.dtype:
    """Of weights and stream."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def _zero_bytes(config: Config, held: int) -> int:
    """Buffers that ZeRO 2 and 3 reduce gradients in, as they come and in fp32, and the weights that ZeRO-3 gathers."""
    stage, size = config.zero.stage, dtype_of(config).itemsize
    if stage < 2:
        return 0
    reduced = min(held, REDUCE_BUCKET) * (4 if size == 4 else size + 4)
    return reduced + (min(held, GATHERED) * size if stage == 3 else 0)


def _bytes_at_the_step(config: Config, held: int, sharing: int) -> int:
    """What DeepSpeed makes at the end of a step for ZeRO 0 and 1, beyond gradients and optimizer state."""
    if config.zero.stage >= 2:
        return 0
    if dtype_of(config).itemsize == 4 or config.zero.offload_optimizer:
        return 4 * (min(held, REDUCE_BUCKET) + held // (sharing if config.zero.stage else 1))
    return 4 * held if held <= _COPIED and sharing > 1 else 0


def _pipeline_bytes(config: Config, stage: Stage) -> int:
    """Outputs sent onward are held until their gradients return; one state and one gradient are on their way in."""
    parallel, model = config.parallel, config.model
    if parallel.pp == 1:
        return 0
    tokens = config.train.micro_batch * model.sequence_length // (parallel.cp * (parallel.tp if parallel.sp else 1))
    # Each virtual stage sends onward too.
    return round((stage.in_flight * parallel.vpp + 2) * tokens * model.hidden_size * dtype_of(config).itemsize)
