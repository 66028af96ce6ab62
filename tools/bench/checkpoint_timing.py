"""The measurement and the table of the benchmark `checkpoint`."""

import argparse
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zlib_ng import zlib_ng

from pretrain import parallel
from pretrain.checkpoint import loading, saving, store
from pretrain.checkpoint.callback import checkpoint_group
from pretrain.engine import Engine
from pretrain.errors import UserError
from pretrain.state import TrainState
from tools.bench import pairs
from tools.bench.alone import launched_alone
from tools.bench.contenders import random_batches, synchronizer, uniform_counts
from tools.bench.report import Report, table
from tools.bench.step import PRESETS
from tools.bench.step_timing import bench_config

WRITE, SAVE, STALL, SUM, READ, LOAD = "plain write", "save", "stall", "crc32", "plain read", "load"
GOALS = ((SAVE, WRITE, "at most 1.67 (0.6 of the speed)"), (STALL, SAVE, "at most 0.15"), (LOAD, READ, "at most 1.67"))
_CHUNK = 8 << 20
_STEP = 1


@dataclass(frozen=True)
class Bench:
    """Everything the turns need.

    Attributes:
        folder: of this benchmark alone, on the disk in question.
        bytes: of tensors in a checkpoint.
    """

    engine: Engine
    folder: Path
    vocab_size: int
    bytes: int
    background: saving.Background
    record: dict[str, Any]

    @property
    def kept(self) -> Path:
        """The checkpoint that is loaded."""
        return self.folder / f"kept/step-{_STEP:08d}"

    def save(self, name: str = "saved") -> None:
        """Save at once."""
        saving.save(self.engine, self.folder / name, _STEP, self.vocab_size, self.record)

    def begin(self) -> None:
        """What a training step waits for."""
        job = saving.job_of(self.engine, self.folder / "saved", _STEP, self.vocab_size, self.record)
        self.background.begin(job)

    def load(self) -> None:
        """Load what was kept."""
        loading.load(self.engine, self.kept, self.vocab_size, store.read_record(self.kept))

    def prepare(self) -> None:
        """Before a turn: nothing is being written, nothing lies there but what is read, and that on disk alone."""
        if fault := self.background.wait():
            raise UserError(fault)
        shutil.rmtree(self.folder / "saved", ignore_errors=True)
        for file in (self.folder / "plain", *self.kept.glob("*")):
            drop_from_cache(file)


def run(arguments: argparse.Namespace) -> Report:
    """Build the model, save it once, and time the rows by turns.

    Raises:
        UserError: several processes, or a folder that takes no checkpoint.
    """
    launch = launched_alone("checkpoint")
    try:
        folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=arguments.folder))
    except OSError as error:
        raise UserError(f"--folder {arguments.folder}: {error.strerror}") from None
    try:
        config = bench_config(PRESETS[arguments.preset], "bf16", None)
        place = parallel.start(launch, config.parallel, config.train.seed)
        engine = Engine(config, config.model, uniform_counts(config), place)
        engine.forward_backward(random_batches(config, place.device)[:1])
        engine.step(config.optimizer.lr)
        bench, memory = set_up(engine, folder, config.model.vocab_size or 0)
        timings = pairs.interleave(turns(bench), arguments.rounds, synchronizer(place.device), bench.prepare)
        bench.prepare()
    finally:
        shutil.rmtree(folder)
        parallel.stop()
    settings = {"preset": arguments.preset, "rounds": arguments.rounds, "model": dataclasses.asdict(config.model)}
    return Report(describe(arguments.preset, bench, timings, memory), results(bench, timings, memory), settings)


def set_up(engine: Engine, folder: Path, vocab_size: int) -> tuple[Bench, dict[str, int]]:
    """Write what is read later, warm up, and measure the memory that saving and loading take meanwhile."""
    state = TrainState(step=_STEP).to_dict()
    record = {"state": state, "config": {}, "dp_size": 1, "vocab_size": vocab_size}
    record |= {"data_fingerprint": "", "datasets": {}, "tokenizer_sha256": ""}
    background = saving.Background(checkpoint_group(), lambda job, fault: None)
    job = saving.job_of(engine, folder, _STEP, vocab_size, record)
    size = sum(piece.tensor.nbytes for piece in job.pieces)
    bench = Bench(engine, folder, vocab_size, size, background, record)
    bench.save("warm")  # what the first save of a process imports and allocates is no part of it
    shutil.rmtree(folder / "warm")
    memory = {"largest_parameter": 4 * max(parameter.numel() for parameter in engine.module.parameters())}
    memory |= {"save": peak_growth(lambda: bench.save("kept")), "load": peak_growth(bench.load)}
    plain_write(folder / "plain", size)
    bench.begin()
    return bench, memory


def turns(bench: Bench) -> dict[str, pairs.Turn]:
    """The rows in the order of their turns."""
    content = memoryview(bytearray(_CHUNK))

    def checksum() -> None:
        for _ in range(0, bench.bytes, _CHUNK):
            zlib_ng.crc32(content)

    return {
        WRITE: lambda: plain_write(bench.folder / "written", bench.bytes),
        SAVE: bench.save,
        STALL: bench.begin,
        SUM: checksum,
        READ: lambda: plain_read(bench.folder / "plain"),
        LOAD: bench.load,
    }


def plain_write(path: Path, size: int) -> None:
    """A file of ``size`` bytes in large pieces, on disk when it returns; nothing is computed."""
    content = memoryview(os.urandom(_CHUNK))
    path.unlink(missing_ok=True)
    with path.open("xb", buffering=0) as stream:
        for start in range(0, size, _CHUNK):
            stream.write(content[: size - start])
        os.fsync(stream.fileno())


def plain_read(path: Path) -> None:
    """All of a file, into one buffer."""
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def drop_from_cache(path: Path) -> None:
    """Let the next reader fetch a file that is on disk from there."""
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_growth(action: Callable[[], object]) -> int:
    """Bytes of memory that this process holds at most during ``action``, beyond what it held before; Linux alone."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise UserError(f"/proc/self/status does not tell {name}; this benchmark needs Linux")


def describe(preset: str, bench: Bench, timings: pairs.Rounds, memory: dict[str, int]) -> str:
    """The table, and what the rows are."""
    rows = []
    for name, column in timings.items():
        wall = pairs.spread([timing.wall for timing in column])
        cells = [name, f"{wall.median:.2f}", f"{wall.minimum:.2f}-{wall.maximum:.2f}"]
        rows.append([*cells, f"{bench.bytes / wall.median / 1e6:,.0f}"])
    ratios = [[f"{name} / {peer}", *_ratio(timings, name, peer), goal] for name, peer, goal in GOALS]
    megabytes = {name: f"{value / 1e6:,.0f}" for name, value in memory.items()}
    return (
        f"{preset}: {bench.bytes / 1e6:,.0f} MB of tensors in a checkpoint, on the disk of {bench.folder.parent}\n"
        f"{WRITE}: with an fsync; {SAVE}: until it is durable; {STALL}: what a step waits for when the save is "
        f"asynchronous;\n{SUM}: of as much memory; {READ} and {LOAD}: not in the system's cache, {LOAD} with all "
        f"checksums\n\n{table(['', 'seconds', 'min-max', 'MB/s'], rows)}\n\n"
        f"{table(['', 'ratio', 'quartiles', 'goal'], ratios)}\n\n"
        f"memory beyond what is held anyway: {megabytes['save']} MB to save, {megabytes['load']} MB to load; the "
        f"largest parameter has {megabytes['largest_parameter']} MB in fp32"
    )


def _ratio(timings: pairs.Rounds, name: str, peer: str) -> Sequence[str]:
    spread = pairs.ratio(timings, name, peer)
    return f"{spread.median:.3f}", f"{spread.lower_quartile:.3f}-{spread.upper_quartile:.3f}"


def results(bench: Bench, timings: pairs.Rounds, memory: dict[str, int]) -> dict[str, Any]:
    """Every single timing, the ratios, and the memory in bytes."""
    return {
        "bytes": bench.bytes,
        "rows": {name: [dataclasses.asdict(timing) for timing in column] for name, column in timings.items()},
        "ratios": {f"{name} / {peer}": dataclasses.asdict(pairs.ratio(timings, name, peer)) for name, peer, _ in GOALS},
        "memory": memory,
    }
