"""Resident memory of a reader over very many samples, in a process of its own.

``python -m tools.bench.data_memory FOLDER BATCH`` reads a data set and prints its memory as one JSON object.
"""

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from pretrain.data.batches import TrainingBatches
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.reader import MAX_OPEN_SHARDS
from tools.bench.data_parts import Section
from tools.bench.data_resume import start_batches
from tools.bench.data_simulated import Simulation, simulate
from tools.bench.report import table

_MIB = 1 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Growth:
    """Resident memory of this process beyond what it held before, bytes.

    Attributes:
        peak: the most while something was done.
        held: at its end.
    """

    peak: int
    held: int


def measure(arguments: argparse.Namespace, folder: Path) -> Section:
    """Simulate the data set, and have it read by a fresh process."""
    simulation = Simulation(arguments.memory_samples, arguments.sequence_length)
    simulate(folder, simulation)
    command = [sys.executable, "-m", "tools.bench.data_memory", str(folder), str(arguments.batch)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]).stdout
    found: dict[str, dict[str, int]] = json.loads(output)
    cells = [[name, *(f"{growth[key] / _MIB:.0f}" for key in ("peak", "held"))] for name, growth in found.items()]
    text = (
        f"{simulation.samples} samples in {simulation.shards} shards; resident beyond the imports, mapped indices "
        f"included\n\n{table(['', 'peak MiB', 'held MiB'], cells)}"
    )
    return Section(text, {"samples": simulation.samples, "shards": simulation.shards, "growth": found})


def growth_by(work: Callable[[], Result]) -> tuple[Growth, Result]:
    """Do something; its growth, while its result is alive, and the result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM")
    gc.collect()
    return Growth(peak - before, _status("VmRSS") - before), result


def _status(key: str) -> int:
    """A size out of the kernel's account of this process, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def read_widely(manifest: Manifest, batch: int) -> TrainingBatches:
    """Read neighbouring batches late in the epoch, then ones all over it until as many shards are open as may be."""
    batches = start_batches(manifest, batch)
    samples = manifest.split("train").samples
    starts = [samples * 9 // 10 + step * batch for step in range(64)]
    starts += np.linspace(0, samples - batch, 2 * MAX_OPEN_SHARDS // batch + 64, dtype=np.int64).tolist()
    for start in sorted(starts):
        rows = batches.read(np.arange(start, start + batch))
        if not rows.sound.all():
            raise RuntimeError("a sample was not what had been written")
    return batches


def main() -> None:
    """Measure, and print what was found as JSON."""
    folder, batch = Path(sys.argv[1]), int(sys.argv[2])
    loading, manifest = growth_by(lambda: load_manifest(folder))
    reading, _batches = growth_by(lambda: read_widely(manifest, batch))
    together = Growth(loading.held + reading.peak, loading.held + reading.held)
    print(json.dumps({"manifest": dataclasses.asdict(loading), "manifest and reading": dataclasses.asdict(together)}))


if __name__ == "__main__":
    main()
