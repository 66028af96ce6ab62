"""The first batch after a resume far into a large data set: order, mixture and reader made anew, then one read."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pretrain.data.batches import Source, TrainingBatches
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.mixture import Mixture, next_stage
from pretrain.data.order import SampleOrder
from pretrain.data.reader import Rows, ShardReader
from pretrain.datasets import Dataset, shares_of
from tools.bench import pairs
from tools.bench.data_parts import Section
from tools.bench.data_simulated import Simulation, simulate
from tools.bench.report import table

ROUNDS = 15
SEED = 0
LOADING, FIRST_BATCH = "load the manifest", "first batch"


def measure(arguments: argparse.Namespace, folder: Path) -> Section:
    """Time a resume at 90 % of the samples; the files are in memory, the objects all new."""
    simulation = Simulation(arguments.resume_samples, arguments.sequence_length)
    simulate(folder, simulation)
    manifest = load_manifest(folder)
    consumed = manifest.split("train").samples * 9 // 10
    turns: dict[str, Callable[[], object]] = {
        LOADING: lambda: load_manifest(folder),
        FIRST_BATCH: lambda: first_batch(manifest, consumed, arguments.batch),
    }
    for turn in turns.values():
        turn()
    timings = pairs.interleave(turns, arguments.rounds or ROUNDS)
    cells = []
    for name, column in timings.items():
        wall = pairs.spread([1e3 * timing.wall for timing in column])
        cpu = pairs.spread([1e3 * timing.cpu for timing in column])
        given = pairs.cores_given(column)
        cells.append([name, f"{wall.median:.1f}", f"{wall.minimum:.1f}-{wall.maximum:.1f}", f"{cpu.median:.1f}"])
        cells[-1].append(f"{given:.2f}")
    text = (
        f"at sample {consumed} of {manifest.split('train').samples} in {simulation.shards} shards, "
        f"{arguments.batch} samples\nrounds: {len(timings[FIRST_BATCH])}\n\n"
        f"{table(['', 'ms', 'min-max', 'CPU ms', 'cpu/wall'], cells)}"
    )
    return Section(text, {name: [dataclasses.asdict(timing) for timing in column] for name, column in timings.items()})


def first_batch(manifest: Manifest, consumed: int, batch: int) -> Rows:
    """What a run reads first that goes on after so many samples."""
    return start_batches(manifest, batch).read(np.arange(consumed, consumed + batch))


def start_batches(manifest: Manifest, batch: int) -> TrainingBatches:
    """A run's batches of one data set, in one process."""
    reader = ShardReader(manifest, "train", manifest.sequence_length)
    shares = shares_of([Dataset(manifest.name, manifest)], manifest.sequence_length)
    mixture = Mixture([next_stage([], SEED, 0, shares)], SEED)
    source = Source(reader, SampleOrder(reader.shard_sizes, SEED))
    return TrainingBatches([source], mixture, batch, batch, 0, 1)
