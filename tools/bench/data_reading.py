"""Shuffled reading in one thread: tokens per CPU-second of our reader and its peers, on the same samples."""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench import pairs
from tools.bench.data_formats import WRITERS, Rows
from tools.bench.data_parts import Section
from tools.bench.data_readers import CONTENDERS, Batches
from tools.bench.report import table

ROUNDS = 15
TURN_SAMPLES = 1024
OURS = "ours"

Missing = dict[str, str]
"""Contender -> why it cannot take part."""


def measure(arguments: argparse.Namespace, folder: Path) -> Section:
    """Write all formats, read each through once, then time the contenders in turns.

    CPU time is that of the thread that reads, so that nobody pays for threads which another keeps; of who has such
    threads it is that of the process.
    """
    rows = Rows(arguments.samples, arguments.sequence_length, min(4096, arguments.samples))
    readers, missing = start_readers(folder, rows, arguments.batch)
    calls = max(1, TURN_SAMPLES // arguments.batch)
    turns = {name: _turn(batches, calls) for name, batches in readers.items()}
    for name, turn in turns.items():
        for _ in range(-(-rows.count // (calls * arguments.batch)) + 1):
            turn()
        print(f"read {rows.count} samples by {name}")
    clocks = {name: time.thread_time for name, contender in CONTENDERS.items() if not contender.threaded}
    timings = pairs.interleave(turns, arguments.rounds or ROUNDS, clocks=clocks)
    for batches in readers.values():
        batches.close()
    return describe(rows, arguments.batch, calls, timings, missing)


def start_readers(folder: Path, rows: Rows, batch: int) -> tuple[dict[str, Batches], Missing]:
    """The contenders that are installed, on data written for them, and why the others are not there."""
    readers: dict[str, Batches] = {}
    missing: Missing = {}
    for name, contender in CONTENDERS.items():
        target = folder / contender.form
        try:
            if not target.exists():
                WRITERS[contender.form](target, rows)
                print(f"wrote the format {contender.form}")
            readers[name] = contender.batches(target, rows, batch)
        except ImportError as error:
            missing[name] = str(error)
    return readers, missing


def _turn(batches: Batches, calls: int) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(calls):
            next(batches)

    return turn


def describe(rows: Rows, batch: int, calls: int, timings: pairs.Rounds, missing: Missing) -> Section:
    """The table; a contender that is missing has a row of empty cells and a line that says why."""
    tokens = calls * batch * (rows.sequence_length + 1)
    head = ["", "Mtokens/CPU-s", "min-max", "ours / it", "quartiles", "cpu/wall"]
    cells: list[list[str]] = []
    results: dict[str, Any] = {}
    for name in CONTENDERS:
        if name not in timings:
            cells.append([name, *[""] * (len(head) - 1)])
            results[name] = None
            continue
        rate = pairs.spread([tokens / timing.cpu / 1e6 for timing in timings[name]])
        ratio = pairs.ratio(timings, name, OURS, pairs.cpu)
        given = pairs.cores_given(timings[name])
        cells.append(
            [
                *(name, f"{rate.median:.0f}", f"{rate.minimum:.0f}-{rate.maximum:.0f}", f"{ratio.median:.2f}"),
                *(f"{ratio.lower_quartile:.2f}-{ratio.upper_quartile:.2f}", f"{given:.2f}"),
            ]
        )
        results[name] = {
            "mtokens_per_cpu_s": dataclasses.asdict(rate),
            "ours_over_it": dataclasses.asdict(ratio),
            "cpu_over_wall": given,
            "rounds": [dataclasses.asdict(timing) for timing in timings[name]],
        }
    lines = [
        f"\n{name} is not measured: {why} (see the extra `bench` in pyproject.toml)" for name, why in missing.items()
    ]
    text = (
        f"shuffled, {rows.count} samples of {rows.sequence_length + 1} uint16, read in one thread as int64, {batch} a "
        f"call; ours compares each with its crc32, the others check nothing\n"
        f"rounds: {len(timings[OURS])} of {calls * batch} samples; ratios are of the same round\n\n"
        f"{table(head, cells)}{''.join(lines)}"
    )
    return Section(text, {"contenders": results, "missing": missing})
