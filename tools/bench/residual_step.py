"""Whole training steps: the sphere against layers with norms, both by the same kernels."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pretrain import parallel
from pretrain.launch import read_launch
from tools.bench import pairs
from tools.bench.contenders import GEONORM, PRE_NORM, random_batches, start_engine, synchronizer, warm_up
from tools.bench.report import table
from tools.bench.step import MICRO_BATCHES, PRESETS
from tools.bench.step_timing import bench_config, tokens_per_step


def run(preset: str, rounds: int, counts: Sequence[int]) -> tuple[str, Any]:
    """The table and every timing, for each number of threads."""
    config = bench_config(PRESETS[preset], "bf16", None, "model.kernels=compiled")
    place = parallel.start(read_launch(), config.parallel, config.train.seed)
    batches = random_batches(config, place.device)
    contenders = {
        name: warm_up(partial(start_engine, config, name, place, batches), place.device) for name in (PRE_NORM, GEONORM)
    }
    rows, results, doubts = [], [], []
    for count in counts:
        torch.set_num_threads(count)
        turns = {name: contender.step for name, contender in contenders.items()}
        timings = pairs.interleave(turns, rounds, synchronizer(place.device))
        ratio = pairs.ratio(timings, GEONORM, PRE_NORM).median
        low, high = pairs.bounds(pairs.ratios(timings, GEONORM, PRE_NORM))
        for name, turns_taken in timings.items():
            milliseconds = f"{pairs.spread([turn.wall for turn in turns_taken]).median * 1e3:.1f}"
            compared = [f"{ratio:.3f}", f"{low:.3f}-{high:.3f}"] if name == GEONORM else ["", ""]
            rows.append([f"{name}, {count} threads", milliseconds, *compared, f"{pairs.cores_given(turns_taken):.2f}"])
        results.append(
            {
                "threads": count,
                "rows": {name: [dataclasses.asdict(turn) for turn in taken] for name, taken in timings.items()},
            }
        )
        doubts.append(pairs.doubt(timings, count))
    parallel.stop()
    text = (
        f"{table(['whole step', 'ms', f'/ {PRE_NORM}', '95 %', 'cpu/wall'], rows)}\n\n"
        f"{preset}, bf16, {tokens_per_step(config)} tokens in {MICRO_BATCHES} micro batches, "
        f"{config.model.kernels} kernels, {rounds} rounds" + next((doubt for doubt in doubts if doubt), "")
    )
    return text, results
