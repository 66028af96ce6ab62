"""Every sample once an epoch, by real processes that are killed at random steps and go on in other numbers."""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from pretrain.data.manifest import Manifest
from tests.launch import REPOSITORY
from tests.pretrain.data.once_worker import GLOBAL_BATCH, readers_of

# What was consumed in a step, by each start of the run that came as far as it.
Consumed = dict[int, list[list[str]]]


class Job:
    """The processes of one start of the run; this one is their network."""

    def __init__(self, folder: Path, state: Path, steps: int, dp_size: int) -> None:
        worker = [sys.executable, "-m", "tests.pretrain.data.once_worker", str(folder), str(state), str(steps)]
        self.processes = [
            subprocess.Popen(
                [*worker, str(dp_rank), str(dp_size)],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for dp_rank in range(dp_size)
        ]

    def step(self, consumed: Consumed) -> bool:
        """Gather a step of all processes, write it down, and let them go on; False at the end of the run."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            assert not any(lines), "some processes ended before others"
            return False
        told = [json.loads(line) for line in lines]
        (step,) = {number for number, _ in told}
        consumed[step].append([sample for _, samples in told for sample in samples])
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return True

    def end(self, kill: bool) -> None:
        """kill -9, or wait for the end that they have come to."""
        for process in self.processes:
            if kill:
                process.kill()
            process.communicate()
            assert process.returncode == (-9 if kill else 0)


def test_killed_processes_that_go_on_in_other_numbers_consume_each_sample_once(
    manifest: Manifest, tmp_path: Path
) -> None:
    # Two samples of a text may be equal; those of one data set are none of the other's.
    data_sets = [
        Counter(hashlib.sha256(reader.read(sample).tobytes()).hexdigest()[:16] for sample in range(len(reader)))
        for reader in readers_of(manifest.directory)
    ]
    assert not data_sets[0].keys() & data_sets[1].keys()
    largest = max(samples.total() for samples in data_sets)
    steps = int(2.4 * largest / 0.7) // GLOBAL_BATCH

    whole: Consumed = defaultdict(list)
    job = Job(manifest.directory, tmp_path / "whole.json", steps, 1)
    while job.step(whole):
        continue
    job.end(kill=False)
    assert sorted(whole) == list(range(steps))

    killed: Consumed = defaultdict(list)
    seed = time.time_ns()
    moments = random.Random(seed)
    layouts = [2, 8, 1, 3, 4, 2]
    for place, dp_size in enumerate(layouts):
        job = Job(manifest.directory, tmp_path / "state.json", steps, dp_size)
        last = place == len(layouts) - 1
        wanted = steps if last else moments.randint(1, steps // len(layouts))
        while wanted and job.step(killed):
            wanted -= 1
        time.sleep(0 if last else moments.uniform(0, 0.01))  # in the midst of reading, or of saving the state
        job.end(kill=not last)
    assert sorted(killed) == list(range(steps)), seed
    assert sum(map(len, killed.values())) > steps, f"no step was repeated: {seed}"
    for step, seen in killed.items():
        assert seen == [whole[step][0]] * len(seen), f"step {step}, {seed}"

    sequence = [sample for step in range(steps) for sample in killed[step][-1]]
    for samples in data_sets:
        own, size = [sample for sample in sequence if sample in samples], samples.total()
        epochs = [Counter(own[start : start + size]) for start in range(0, len(own), size)]
        assert len(epochs) >= 3
        assert epochs[:-1] == [samples] * (len(epochs) - 1)
        assert epochs[-1] <= samples
