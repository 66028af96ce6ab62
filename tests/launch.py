"""Start one gloo process per global rank and collect what they print."""

import atexit
import contextlib
import functools
import os
import random
import signal
import socket
import tempfile
import time
from pathlib import Path

from tests.template import Forked, Template

REPOSITORY = Path(__file__).resolve().parents[1]
TAIL_CHARACTERS = 4000
POLL_SECONDS = 0.05
_PORTS = random.SystemRandom()  # other test runs on this machine must not draw the same


class LaunchError(AssertionError):
    """A process failed or the timeout passed; the message holds the tail of every process's output."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now, and that no outgoing connection takes before it is used."""
    while True:
        port = _PORTS.randrange(10_240, 20_000)  # below what systems give to connections, and to Slurm's jobs here
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def environment(global_rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables of one process, as torchrun sets them for one host without a GPU."""
    return os.environ | {
        "RANK": str(global_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(global_rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONUNBUFFERED": "1",
    }


@functools.cache
def template() -> Template:
    """The process that forks start from, itself started when first asked for."""
    folder = tempfile.TemporaryDirectory(prefix="template-")
    started = Template(Path(folder.name), environment(0, 1, free_port()))
    atexit.register(folder.cleanup)
    atexit.register(started.close)
    return started


def launch(worker: str, world_size: int, *arguments: str, timeout: float = 180.0) -> list[str]:
    """Run ``python -m worker *arguments`` once per global rank and return each one's standard output.

    Args:
        worker: dotted module name, importable from the repository root.
        world_size: number of processes.
        arguments: passed to every process alike.
        timeout: seconds for all of them together.

    Raises:
        LaunchError: a process ended with a status other than 0, or the timeout passed. All of them are killed first.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        logs = [(Path(folder) / f"{i}.out", Path(folder) / f"{i}.err") for i in range(world_size)]
        processes = [
            template().start(worker, arguments, environment(i, world_size, port), *logs[i]) for i in range(world_size)
        ]
        try:
            failure = _wait(processes, time.monotonic() + timeout)
        finally:
            _kill(processes)
        if failure:
            raise LaunchError("\n".join([f"{worker} {' '.join(arguments)}: {failure}", *map(_tail, logs)]))
        return [out.read_text() for out, _ in logs]


def _wait(processes: list[Forked], deadline: float) -> str | None:
    """None when all ended well, else what went wrong, as soon as it is known."""
    while True:
        statuses = [process.poll() for process in processes]
        failed = {i: status for i, status in enumerate(statuses) if status}
        if failed:
            return f"exit status by global rank {failed}"
        if all(status == 0 for status in statuses):
            return None
        if time.monotonic() > deadline:
            return f"timed out; still running: global ranks {[i for i, s in enumerate(statuses) if s is None]}"
        time.sleep(POLL_SECONDS)


def _kill(processes: list[Forked]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(log: tuple[Path, Path]) -> str:
    out, err = (path.read_text(errors="replace")[-TAIL_CHARACTERS:] for path in log)
    return f"--- global rank {log[0].stem}, stdout\n{out}\n--- stderr\n{err}"
