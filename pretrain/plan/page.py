"""A plan as a page of text."""

import textwrap

from megatron_ext.flops import CONVENTION
from pretrain.plan.layouts import Layout, changes
from pretrain.plan.plan import Plan
from pretrain.rampup import steps_by_batch

_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_TIMES = {
    "recompute": "recomputation",
    "bubble": "pipeline bubble",
    "tensor": "tp all-reduces",
    "context": "cp keys and values",
    "data": "dp gradients and weights",
}
"""What adds to the time of the model's own arithmetic, in words."""


def page(plan: Plan) -> str:
    """The plan for a reader; every number has its unit."""
    lines = [*_head(plan), "", *_memory(plan), "", *_time(plan), "", *_disk(plan), *_remarks(plan)]
    return "\n".join(lines)


def _head(plan: Plan) -> list[str]:
    config, machines, layout = plan.config, plan.machines, plan.config.parallel
    held = sorted(set(plan.parameters_of_ranks))
    ranks = " to ".join(_count(number) for number in dict.fromkeys((held[0], held[-1])))
    micro = config.train.global_batch // (config.train.micro_batch * plan.dp)
    return [
        f"{config.model.residual.scheme}, {plan.parameters:,} parameters, vocabulary {plan.vocab_size:,}; "
        f"{ranks} parameters on a rank",
        f"on {machines.gpus} x {machines.gpu.name}: {layout.described()} x dp {plan.dp}"
        f"{', sp' if layout.sp else ''}, ZeRO-{config.zero.stage}, {config.train.precision}, "
        f"recompute {config.model.recompute}, {micro} micro batches of {config.train.micro_batch} a rank and step",
    ]


def _memory(plan: Plan) -> list[str]:
    memory, config = plan.layout.memory, plan.config
    kinds = [
        ("weights", memory.weights, config.train.precision),
        ("gradients", memory.gradients, "fp32"),
        ("optimizer", memory.optimizer, _whereabouts(plan)),
        ("activations", memory.activations, "kept for the backward pass"),
        ("at work", memory.work, "logits and loss, or one layer, whichever is more"),
        ("buffers", memory.buffers, "pipeline messages, DeepSpeed's copy of the gradients"),
        ("runtime", memory.runtime, "CUDA and NCCL, assumed"),
    ]
    where = f", pipeline stage {plan.layout.pp_rank + 1} of {config.parallel.pp}" if config.parallel.pp > 1 else ""
    usable = plan.machines.usable_bytes / 2**30
    return [
        f"memory of the fullest rank{where}, GiB",
        *(f"  {name:<12} {size / 2**30:8.2f}   {words}" for name, size, words in kinds),
        f"  {'total':<12} {memory.total / 2**30:8.2f}   {'fits' if plan.fits else 'DOES NOT FIT'}: "
        f"{usable:.1f} of {plan.machines.gpu.memory_gib:g} GiB are usable",
    ]


def _whereabouts(plan: Plan) -> str:
    if plan.config.zero.offload_optimizer:
        return "fp32 masters and AdamW's moments are in host memory"
    whole = "whole on every rank" if plan.config.zero.stage == 0 else f"over {plan.dp * plan.config.parallel.cp} ranks"
    return f"fp32 masters and AdamW's moments {whole}"


def _time(plan: Plan) -> list[str]:
    time, machines = plan.layout.time, plan.machines
    parts = [(words, getattr(time, field)) for field, words in _TIMES.items()]
    more = "".join(f" + {_duration(seconds)} {words}" for words, seconds in parts if seconds > 0.001 * time.total)
    return [
        f"step    {_count(plan.step_tokens)} tokens, {plan.flops:.3g} FLOPs, {_duration(time.total)}, "
        f"{_count(plan.step_tokens / time.total)} tokens/s",
        f"        {_duration(time.model)} at {machines.mfu:.0%} of {machines.gpu.bf16_tflops:g} TFLOP/s (--mfu){more}; "
        f"MFU of the whole step {time.mfu:.0%}",
        f"run     {plan.config.train.steps:,} steps, {_count(plan.tokens)} tokens{_epochs(plan)}, "
        f"{_duration(plan.seconds)}, {plan.seconds / 3600 * machines.gpus:,.0f} GPU hours (validation and checkpoints "
        "not counted)",
        *_rampup(plan),
        f"FLOPs   {CONVENTION[0]}",
        f"        {CONVENTION[1]}",
    ]


def _rampup(plan: Plan) -> list[str]:
    train = plan.config.train
    if train.rampup.start is None:
        return []
    ramp = [(batch, count) for batch, count in steps_by_batch(train.steps, train) if batch < train.global_batch]
    steps, samples = sum(count for _, count in ramp), sum(batch * count for batch, count in ramp)
    return [
        f"        batch {train.rampup.start} to {ramp[-1][0]} samples in the first {steps:,} steps, "
        f"{_count(samples * plan.config.model.sequence_length)} tokens; {train.global_batch} behind them"
    ]


def _epochs(plan: Plan) -> str:
    return f" ({plan.tokens / plan.epoch_tokens:.2g} epochs of the data)" if plan.epoch_tokens else ""


def _disk(plan: Plan) -> list[str]:
    disk = plan.disk
    return [
        f"disk    {disk.each / 1e9:,.1f} GB a checkpoint, {disk.saved} in the run, "
        f"{disk.kept} kept: {disk.total / 1e9:,.0f} GB"
    ]


def _remarks(plan: Plan) -> list[str]:
    lines = [
        part for line in plan.warnings for part in textwrap.wrap(f"warning: {line}", 120, subsequent_indent=" " * 9)
    ]
    if plan.better is not None:
        lines += [
            f"better:  {' '.join(changes(plan.config, plan.better.config))}",
            f"         {_why(plan, plan.better)}",
        ]
    elif not plan.fits:
        lines += ["better:  no layout on these GPUs fits; take more of them (--gpus) or a smaller model"]
    return ["", *lines] if lines else []


def _why(plan: Plan, better: Layout) -> str:
    before, after = plan.layout, better
    reasons = [f"a step in {_duration(after.time.total)} instead of {_duration(before.time.total)}"]
    reasons += [f"{after.memory.total / 2**30:.1f} GiB instead of {before.memory.total / 2**30:.1f}"]
    names = {
        "recompute": "recomputation",
        "bubble": "pipeline bubble",
        "tensor": "tp all-reduces",
        "context": "cp keys and values",
        "data": "dp traffic",
    }
    for field, words in names.items():
        saved = getattr(before.time, field) - getattr(after.time, field)
        if saved > 0.01 * before.time.total:
            reasons.append(f"{_duration(saved)} less {words}")
    return ", ".join(reasons)


def _count(number: float) -> str:
    """Three digits and a word for the size."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    for name, size in _UNITS:
        if seconds >= (2 if size > 1 else 1) * size:
            return f"{seconds / size:.3g} {name}"
    return f"{1000 * seconds:.3g} ms"
