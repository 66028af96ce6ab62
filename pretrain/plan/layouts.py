"""Search for a layout that fits and is faster."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.memory import StageParts, stage_parts
from pretrain.config import Config
from pretrain.hardware import Gpu
from pretrain.plan.memory import USABLE, Memory, dtype_of, fullest
from pretrain.plan.timing import StepTime, step_time
from pretrain.rules import CONFIG_RULES, LAYOUT_RULES

_LARGEST_MICRO_BATCH = 64
_RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
FEW_TOKENS = 2048
"""Of a micro batch on a GPU: with fewer, matrix products are too small to come near the stated MFU."""


@dataclass(frozen=True)
class Machines:
    """What a run would run on.

    Attributes:
        gpus: over all machines.
        gpu: their kind.
        mfu: share of the peak that is reached while a GPU computes.
    """

    gpus: int
    gpu: Gpu
    mfu: float

    @property
    def usable_bytes(self) -> float:
        """Of one GPU."""
        return USABLE * self.gpu.memory_gib * 2**30


@dataclass(frozen=True)
class Layout:
    """A layout with its costs.

    Attributes:
        config: with the layout's settings.
        pp_rank: of the stage that needs most memory.
        memory: its ranks'.
        time: of a step.
    """

    config: Config
    pp_rank: int
    memory: Memory
    time: StepTime


def rate(config: Config, parts: StageParts, vocab_size: int, machines: Machines) -> Layout:
    """A layout's costs; `parts` are those of its model, tp, sp, cp and micro batch."""
    dp = machines.gpus // config.parallel.ranks_of_a_replica
    pp_rank, memory = fullest(config, parts, dp)
    time = step_time(config, parts, vocab_size, machines.gpus, machines.gpu, machines.mfu)
    return Layout(config, pp_rank, memory, time)


def measured(config: Config, vocab_size: int, micro_batch: int | None = None) -> StageParts:
    """Parts of the config's model on a GPU, for its own micro batch or another."""
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    # Parts are the same for every pp: measured once.
    layout = dataclasses.replace(config.parallel, pp=1, vpp=1)
    return stage_parts(model, layout, micro_batch or config.train.micro_batch, dtype_of(config), "cuda")


def best_layout(config: Config, vocab_size: int, machines: Machines) -> Layout | None:
    """The fastest layout that keeps the rules and fits; None if none does.

    tp, sp, pp, micro batch, recomputation and the ZeRO stage are tried; the batch of a step and the model stay. Other
    cp, which costs time, are tried where nothing else fits. Micro batches too small for a GPU, and smaller than now,
    are taken only where larger ones do not fit: the times do not tell what they lose. Times within 2 % count as equal:
    then the layout that changes fewer settings wins, then the one with more memory to spare.
    """
    own = [config.parallel.cp]
    fitting = _fitting(config, vocab_size, machines, own) or _fitting(
        config, vocab_size, machines, [cp for cp in _powers_of_two(machines.gpus) if cp not in own]
    )
    if not fitting:
        return None
    enough = min(FEW_TOKENS, tokens_of_a_gpu(config))
    fitting = [layout for layout in fitting if tokens_of_a_gpu(layout.config) >= enough] or fitting
    fastest = min(layout.time.total for layout in fitting)
    near = [layout for layout in fitting if layout.time.total <= 1.02 * fastest]
    best = min(near, key=lambda layout: (len(changes(config, layout.config)), layout.memory.total)).config
    return rate(best, measured(best, vocab_size), vocab_size, machines)


def tokens_of_a_gpu(config: Config) -> int:
    """Tokens of a micro batch that a GPU computes, over tp and cp."""
    return config.train.micro_batch * config.model.sequence_length // (config.parallel.tp * config.parallel.cp)


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ, as arguments of the command line."""
    settings = {
        "parallel.tp": (before.parallel.tp, after.parallel.tp),
        "parallel.sp": (before.parallel.sp, after.parallel.sp),
        "parallel.pp": (before.parallel.pp, after.parallel.pp),
        "parallel.vpp": (before.parallel.vpp, after.parallel.vpp),
        "parallel.cp": (before.parallel.cp, after.parallel.cp),
        "zero.stage": (before.zero.stage, after.zero.stage),
        "train.micro_batch": (before.train.micro_batch, after.train.micro_batch),
        "model.recompute": (before.model.recompute, after.model.recompute),
    }
    return [f"{name}={str(new).lower()}" for name, (old, new) in settings.items() if old != new]


def _rate_scaled(config: Config, vocab_size: int, machines: Machines) -> Layout:
    parts = measured(config, vocab_size, micro_batch=1).scaled(config.train.micro_batch)
    return rate(config, parts, vocab_size, machines)


def _fitting(config: Config, vocab_size: int, machines: Machines, cps: Sequence[int]) -> list[Layout]:
    return [
        layout
        for candidate in _candidates(config, machines, cps)
        # Measured for one sample and scaled, which bounds the memory of more from above.
        for layout in [_rate_scaled(candidate, vocab_size, machines)]
        if layout.memory.total <= machines.usable_bytes
    ]


def _candidates(config: Config, machines: Machines, cps: Sequence[int]) -> Iterator[Config]:
    tps = _powers_of_two(min(machines.gpu.per_node, machines.gpus))
    pps = _powers_of_two(machines.gpus)
    micro_batches = sorted({config.train.micro_batch, *_powers_of_two(_LARGEST_MICRO_BATCH)})
    stages = sorted({config.zero.stage, 1, 2, 3})
    vpps = sorted({1, config.parallel.vpp})
    for cp, tp, pp in itertools.product(cps, tps, pps):
        if machines.gpus % (cp * tp * pp):
            continue
        for vpp, stage, micro_batch, recompute in itertools.product(vpps, stages, micro_batches, _RECOMPUTE):
            candidate = config.model_copy(
                update={
                    "parallel": dataclasses.replace(config.parallel, tp=tp, sp=tp > 1, pp=pp, vpp=vpp, cp=cp),
                    "train": config.train.model_copy(update={"micro_batch": micro_batch}),
                    "model": dataclasses.replace(config.model, recompute=recompute),
                    "zero": config.zero.model_copy(update={"stage": stage}),
                }
            )
            if not any(rule(candidate) for rule in CONFIG_RULES) and not any(
                rule(candidate, machines.gpus) for rule in LAYOUT_RULES
            ):
                yield candidate


def _powers_of_two(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length()) if 2**n <= largest]
