"""The measurement and the table of the benchmark `step`."""

import argparse
import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pretrain import parallel
from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.errors import UserError
from pretrain.kernels import with_kernels
from pretrain.rules import check_config
from tools.bench import pairs
from tools.bench.alone import launched_alone
from tools.bench.contenders import GEONORM, PLAIN, PRE_NORM, WARM_UP_STEPS, Contender, build_contenders, synchronizer
from tools.bench.report import Report, table
from tools.bench.step import MICRO_BATCHES, PRESETS, Preset
from tools.bench.step_ranks import LAYOUTS, TwoRanks

CONFIGS = Path(__file__).parents[2] / "configs"


def run(arguments: argparse.Namespace) -> Report:
    """Build the contenders side by side, warm them up and time them.

    Raises:
        UserError: several processes, --compile without a compiler, or --two-ranks on one GPU.
    """
    launch = launched_alone("step")
    if arguments.two_ranks and torch.cuda.device_count() == 1:
        raise UserError("--two-ranks needs two GPUs, and here is one; leave it out")
    kernels = f"model.kernels={arguments.kernels}"
    config = bench_config(PRESETS[arguments.preset], arguments.precision, arguments.micro_batch, kernels)
    place = parallel.start(launch, config.parallel, config.train.seed)
    contenders = build_contenders(config, place, compiled=arguments.compile)
    with ExitStack() as stack:
        clocks = {}
        for layout in LAYOUTS if arguments.two_ranks else ():
            ranks = TwoRanks(layout, arguments.preset, arguments.precision, arguments.micro_batch, arguments.kernels)
            stack.enter_context(ranks)
            name = f"{GEONORM}, {layout}"
            contenders[name], clocks[name] = ranks.contender(), ranks.clock
        turns = {name: contender.step for name, contender in contenders.items()}
        timings = pairs.interleave(turns, arguments.rounds, synchronizer(place.device), clocks=clocks)
    parallel.stop()
    settings = {
        "preset": arguments.preset,
        "rounds": arguments.rounds,
        "warm_up_steps": WARM_UP_STEPS,
        "model": dataclasses.asdict(config.model),
        "train": config.train.model_dump(),
        "optimizer": config.optimizer.model_dump(),
    }
    return Report(
        describe(arguments.preset, config, contenders, timings), results(config, contenders, timings), settings
    )


def bench_config(source: Preset, precision: str, micro_batch: int | None, *more: str) -> Config:
    """The preset's configuration for one process, with the command line's precision and micro batch (or its own).

    Of several processes ``more`` says what they divide.
    """
    forced = [*source.overrides, f"train.precision={precision}", "parallel.tp=1", "parallel.sp=false", "parallel.pp=1"]
    if micro_batch is not None:
        forced.append(f"train.micro_batch={micro_batch}")
    config = load_config(CONFIGS / source.config, [*forced, *more])
    train = config.train.model_copy(update={"global_batch": MICRO_BATCHES * config.train.micro_batch})
    config = config.model_copy(update={"train": train})
    check_config(config)
    return with_kernels(config, loud=True)


def describe(preset: str, config: Config, contenders: dict[str, Contender], timings: pairs.Rounds) -> str:
    """The table, and above it what was timed."""
    model, train = config.model, config.train
    tokens = tokens_per_step(config)
    cuda = any(contender.peak_bytes for contender in contenders.values())
    head = ["", "ms/step", "min-max", "tokens/s", f"/ {PLAIN}", "quartiles", f"/ {PRE_NORM}", "quartiles", "cpu/wall"]
    rows = []
    for name, contender in contenders.items():
        wall = pairs.spread([timing.wall for timing in timings[name]])
        cells = [name, f"{wall.median * 1e3:.1f}", f"{wall.minimum * 1e3:.1f}-{wall.maximum * 1e3:.1f}"]
        cells.append(f"{tokens / wall.median:,.0f}")
        for peer in (PLAIN, PRE_NORM):
            ratio = pairs.ratio(timings, name, peer)
            cells += [f"{ratio.median:.3f}", f"{ratio.lower_quartile:.3f}-{ratio.upper_quartile:.3f}"]
        cells.append(f"{pairs.cores_given(timings[name]):.2f}")
        rows.append(cells + ([f"{contender.peak_bytes / 2**20:,.0f}" if contender.peak_bytes else "-"] if cuda else []))
    low, high = pairs.bounds(pairs.ratios(timings, GEONORM, PRE_NORM))
    losses = ", ".join(f"{name} {contender.first_loss:.4f}" for name, contender in contenders.items())
    return (
        f"{preset}: {model.num_layers} layers x {model.hidden_size} x {model.num_attention_heads} heads, SwiGLU "
        f"{model.ffn_hidden_size}, vocabulary {model.vocab_size}, {train.precision}; {tokens} tokens a step = "
        f"{MICRO_BATCHES} micro batches x {train.micro_batch} x {model.sequence_length}\n"
        f"{PLAIN}: pre-norm in plain PyTorch; nothing is compiled but what is named so\n"
        f"ours by {model.kernels} kernels\n"
        f"rounds: {len(timings[PLAIN])}; ms/step is the median, a ratio the median of the rounds' ratios\n\n"
        f"{table([*head, *(['peak MiB'] if cuda else [])], rows)}\n\n"
        f"geonorm / pre_norm: 95 % bounds {low:.3f}-{high:.3f}\n"
        f"loss of the first step (equal where the same is computed): {losses}"
        f"{'' if cuda else pairs.doubt(timings, torch.get_num_threads())}"
    )


def results(config: Config, contenders: dict[str, Contender], timings: pairs.Rounds) -> dict[str, Any]:
    """One entry per row, with every single timing."""
    return {
        name: {
            "wall_s": dataclasses.asdict(pairs.spread([timing.wall for timing in timings[name]])),
            "tokens_per_s": tokens_per_step(config) / pairs.spread([timing.wall for timing in timings[name]]).median,
            "ratio_to": {peer: dataclasses.asdict(pairs.ratio(timings, name, peer)) for peer in (PLAIN, PRE_NORM)},
            "cpu_over_wall": pairs.cores_given(timings[name]),
            "first_loss": contender.first_loss,
            "held_bytes": contender.held_bytes,
            "peak_bytes": contender.peak_bytes,
            "rounds": [dataclasses.asdict(timing) for timing in timings[name]],
        }
        for name, contender in contenders.items()
    }


def tokens_per_step(config: Config) -> int:
    """Tokens that one step trains on."""
    return config.train.global_batch * config.model.sequence_length
