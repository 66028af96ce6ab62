"""One of the data-parallel processes of a run that only reads: tells what it consumed, and keeps its state on disk.

``FOLDER STATE STEPS DP_RANK DP_SIZE``. Each step gives one line of JSON, the step and the hash of every sample, and
takes one line: what a collective does in training, all go on or none does. The first process saves the state as a
checkpoint keeps it, every few steps, by a rename.
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

from pretrain.data.batches import Source, TrainingBatches
from pretrain.data.files import write_atomically
from pretrain.data.manifest import load_manifest
from pretrain.data.mixture import Mixture, Share, next_stage
from pretrain.data.order import SampleOrder
from pretrain.data.progress import DataProgress
from pretrain.data.reader import ShardReader

LENGTH, GLOBAL_BATCH, SEED, SAVE_EVERY = 32, 48, 11, 3


def readers_of(folder: Path) -> list[ShardReader]:
    """Two data sets: both splits of one, each as if it were a training split."""
    manifest = load_manifest(folder)
    return [
        ShardReader(dataclasses.replace(manifest, splits={"train": split}, fingerprint=name), "train", LENGTH)
        for name, split in sorted(manifest.splits.items())
    ]


def begin(readers: list[ShardReader]) -> DataProgress:
    """The state of a run that has consumed nothing."""
    shares = [
        Share(reader.manifest.fingerprint, reader.manifest.fingerprint, len(reader), weight, None, 0)
        for reader, weight in zip(readers, (0.7, 0.3), strict=True)
    ]
    return DataProgress([next_stage([], SEED, 0, shares)])


def main() -> None:
    folder, state_file, steps, dp_rank, dp_size = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    readers = readers_of(Path(folder))
    step, progress = 0, begin(readers)
    if state_file.exists():
        saved = json.loads(state_file.read_bytes())
        step, progress = saved["step"], DataProgress.from_dict(saved["data"])
    mixture = Mixture(progress.stages, SEED)
    sources = [
        Source(reader, SampleOrder(reader.shard_sizes, SEED, mixture.orders[reader.manifest.fingerprint]))
        for reader in readers
    ]
    batches = TrainingBatches(sources, mixture, 2, GLOBAL_BATCH, dp_rank, dp_size)
    while step < steps:
        rows = batches.read(progress.draws(step * GLOBAL_BATCH, GLOBAL_BATCH))
        print(json.dumps([step, [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows.tokens]]), flush=True)
        if not sys.stdin.readline():
            return
        step += 1
        if dp_rank == 0 and step % SAVE_EVERY == 0:
            write_atomically(state_file, json.dumps({"step": step, "data": progress.to_dict()}).encode())


if __name__ == "__main__":
    main()
