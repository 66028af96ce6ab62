"""Real runs through the command line: a small data set, processes to start and kill, curves to read back."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launch import REPOSITORY, environment, free_port, template
from tests.template import Forked

SMALL = [
    *("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=48"),
    *("model.sequence_length=32", "train.micro_batch=2", "train.global_batch=4", "optimizer.warmup_steps=2"),
    *("logging.every=4", "validation.every=6", "validation.samples=6", "checkpoint.every=3"),
]


def build_data(folder: Path) -> Path:
    """Corpus, tokenizer and shards from the embedded text; returns the manifest."""
    python("tools.corpus", "--out", str(folder), "--max-bytes", "300000")
    documents, tokenizer = str(folder / "documents.jsonl"), str(folder / "tokenizer.model")
    python("tools.tokenizer", "train", "--input", documents, "--vocab-size", "600", "--out", tokenizer)
    python(
        *("tools.shards", "build", "--input", documents, "--tokenizer", tokenizer, "--out", str(folder / "data")),
        *("--sequence-length", "32", "--validation-fraction", "0.1"),
    )
    return folder / "data" / "manifest.json"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m arguments``; fails with its output unless it ends with status 0."""
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def start(
    overrides: Sequence[str],
    world_size: int,
    log: Path,
    config: str = "configs/demo.yaml",
    source: Path = REPOSITORY,
    module: Sequence[str] = ("pretrain",),
) -> Sequence[subprocess.Popen[bytes] | Forked]:
    """Start one process per rank of ``source``'s code, each in a session of its own; all write to ``log``.

    ``module`` is what takes the command line, and arguments of its own before it.
    """
    port = free_port()
    name, *first = module
    arguments = [*first, "train", str(REPOSITORY / config), *SMALL, *overrides]
    ranks = [environment(rank, world_size, port) for rank in range(world_size)]
    if source == REPOSITORY:
        return [template().start(name, arguments, variables, log, log) for variables in ranks]
    with log.open("ab") as stream:
        return [
            subprocess.Popen(
                [sys.executable, "-m", name, *arguments],
                cwd=source,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for variables in ranks
        ]


def finish(processes: Sequence[subprocess.Popen[bytes] | Forked], log: Path, timeout: float = 180) -> None:
    """Wait for all; fails with the log unless each ended with status 0."""
    try:
        statuses = [process.wait(timeout) for process in processes]
    finally:
        kill(processes)
    assert not any(statuses), log.read_text()


def kill(processes: Sequence[subprocess.Popen[bytes] | Forked]) -> None:
    """kill -9, children included."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def curve(run: Path, tag: str) -> dict[int, float]:
    """Step -> value of one TensorBoard curve as TensorBoard shows it, purged points left out."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = events.Scalars(tag)
    steps = [point.step for point in points]
    assert steps == sorted(set(steps)), f"{tag} runs twice over a step: {steps}"
    return {point.step: point.value for point in points}


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Another process holds the run's lock within."""
    run.mkdir(parents=True)
    script = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.kill()
        holder.wait()
