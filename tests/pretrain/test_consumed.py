"""The samples that a run's model is really given, while it is killed and goes on in other numbers of processes."""

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from pretrain.config_file import load_config
from pretrain.data.manifest import Manifest
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from tests.launch import REPOSITORY
from tests.pretrain import runs
from tests.pretrain.data.small import SEQUENCE_LENGTH, random_set

pytestmark = pytest.mark.dist

STEPS, BATCH, SAMPLES = 24, 4, 16

Sample = tuple[int, ...]


def batches_in(folder: Path) -> dict[int, list[Sample]]:
    """Step -> the global batch of one start of the run, for the steps that all its processes have begun."""
    parts: dict[int, dict[int, list[Sample]]] = {}
    sizes = set()
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it was killed while it wrote
                step, dp_rank, dp_size, rows = json.loads(line)
                parts.setdefault(step, {})[dp_rank] = [tuple(row) for row in rows]
                sizes.add(dp_size)
    return {
        step: [row for dp_rank in sorted(part) for row in part[dp_rank]]
        for step, part in parts.items()
        if len(part) == max(sizes)
    }


def expected_batches(data: Manifest, seed: int) -> list[list[Sample]]:
    """What the seed promises."""
    reader = ShardReader(data, "train", SEQUENCE_LENGTH)
    order = SampleOrder(reader.shard_sizes, seed)
    return [
        [tuple(reader.read(order.sample_id(draw)).tolist()) for draw in range(first, last)]
        for first, last in itertools.pairwise([*range(0, 24, 2), *range(24, BATCH * STEPS, BATCH)])
    ][:STEPS]


def test_each_sample_is_trained_on_once_an_epoch(tmp_path: Path) -> None:
    """kill -9 of two processes, then of one, then two to the end; the batch grows after 12 steps."""
    data = random_set(tmp_path / "data", seed=1, train=SAMPLES, validation=6, samples_per_member=2)
    settings = [f"data.manifest={data.directory}", f"run.dir={tmp_path / 'run'}", f"train.steps={STEPS}"]
    settings += ["validation.every=0", "checkpoint.every=2", f"train.global_batch={BATCH}", "train.micro_batch=1"]
    settings += ["train.rampup.start=2", "train.rampup.increment=2", "train.rampup.samples=24"]
    moments = random.Random(time.time_ns())
    starts = []
    for place, (world_size, first) in enumerate([(2, 0), (1, 8), (2, STEPS)]):
        records = tmp_path / f"start-{place}"
        records.mkdir()
        log = tmp_path / f"log-{place}"
        processes = runs.start(settings, world_size, log, module=("tests.pretrain.recorded_run", str(records)))
        if first == STEPS:
            runs.finish(processes, log)
        else:
            goal = first + moments.randint(3, 7)
            while max(batches_in(records), default=0) < goal and all(process.poll() is None for process in processes):
                time.sleep(0.01)
            assert all(process.poll() is None for process in processes), log.read_text()
            runs.kill(processes)
        starts.append(batches_in(records))
    expected = expected_batches(data, load_config(REPOSITORY / "configs/demo.yaml", []).train.seed)
    assert sum(map(len, starts)) >= STEPS
    for start in starts:
        assert start == {step: expected[step] for step in start}
    consumed = {step: start[step] for start in starts for step in start}
    assert sorted(consumed) == list(range(STEPS))
    # The last start that reached a step is the one whose weights went on.
    sequence = [sample for step in range(STEPS) for sample in consumed[step]]
    epochs = [Counter(sequence[begin : begin + SAMPLES]) for begin in range(0, len(sequence), SAMPLES)]
    assert len(epochs) > 4
    assert all(count == 1 for epoch in epochs for count in epoch.values())
    assert all(epoch.keys() == epochs[0].keys() for epoch in epochs[:-1])
