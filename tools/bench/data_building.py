"""Building shards from text in one and in several processes."""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench import pairs
from tools.bench.data_parts import Section
from tools.bench.data_tokenizing import prepare
from tools.bench.report import table
from tools.shard_writer import ShardLayout
from tools.sharding.build import Building, build

ROUNDS = 3
VALIDATION_FRACTION = 0.25  # so that little text has some of it too
COPIES = 6  # of the text: starting processes takes a second or two, which a real build does not notice


def measure(arguments: argparse.Namespace, folder: Path) -> Section:
    """Build the same data set by turns with each number of processes."""
    once, model = prepare(folder, arguments.text_bytes)
    documents = folder / "copies.jsonl"
    documents.write_bytes(once.read_bytes() * COPIES)
    first = f"{arguments.processes[0]} processes"
    turns = {f"{number} processes": builder(documents, model, folder, number) for number in arguments.processes}
    clocks = dict.fromkeys(turns, cpu_of_all_processes)
    alone: dict[str, list[float]] = {name: [] for name in turns}
    watched = {name: _watched(turn, alone[name]) for name, turn in turns.items()}
    timings = pairs.interleave(watched, arguments.rounds or ROUNDS, clocks=clocks)
    size = documents.stat().st_size
    cells = []
    for name, column in timings.items():
        speed, work = (
            pairs.spread([size / seconds(timing) / 1e6 for timing in column]) for seconds in (pairs.wall, pairs.cpu)
        )
        ratio = pairs.ratio(timings, first, name)
        cells.append(
            [
                *(name, f"{speed.median:.2f}", f"{speed.minimum:.2f}-{speed.maximum:.2f}", f"{ratio.median:.2f}"),
                *(f"{ratio.minimum:.2f}-{ratio.maximum:.2f}", f"{work.median:.2f}"),
                *(f"{pairs.cores_given(column):.2f}", f"{size / pairs.spread(alone[name]).median / 1e6:.2f}"),
            ]
        )
    head = ["", "MB/s", "min-max", f"/ {first}", "min-max", "MB/CPU-s", "cpu/wall", "MB/CPU-s of the first"]
    text = (
        f"{size / 1e6:.1f} MB of JSON lines, start of the processes included, on {len(os.sched_getaffinity(0))} cores\n"
        f"rounds: {len(timings[first])}; where cpu/wall is below the processes, the machine had no more cores "
        f"to give; the first process cuts, packs and writes: its own rate is the bound for any number of others\n\n"
        f"{table(head, cells)}"
    )
    rounds = {name: [dataclasses.asdict(timing) for timing in column] for name, column in timings.items()}
    return Section(text, {"bytes": size, "rounds": rounds, "cpu_of_the_first": alone})


def _watched(turn: Callable[[], object], alone: list[float]) -> Callable[[], None]:
    """The same turn, with the CPU seconds of this process without its children added to a list."""

    def watched() -> None:
        before = time.process_time()
        turn()
        alone.append(time.process_time() - before)

    return watched


def builder(documents: Path, model: Path, folder: Path, processes: int) -> Callable[[], object]:
    """Builds the whole data set anew each time."""
    layout = ShardLayout(name="bench", sequence_length=1024, samples_per_member=128, members_per_shard=256)
    return lambda: build(
        Building(
            inputs=[documents],
            tokenizer=model,
            out=folder / f"shards-{processes}",
            layout=layout,
            validation_fraction=VALIDATION_FRACTION,
            workers=processes,
            force=True,
        )
    )


def cpu_of_all_processes() -> float:
    """Seconds that this process and those that it started, which have ended, computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
