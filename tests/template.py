"""Processes that start at once: forks of a template process that has imported what every rank imports.

Importing torch, Megatron-core and DeepSpeed costs five seconds of CPU a process, most of what a small run costs. A fork
is a process of its own in every other way: own session, environment, arguments, output files, exit status. What forks
cannot show, since they share what happened at import: another order of hashes in each rank, and whatever reads the
environment while it is imported. Tests of the command line itself start Python anew.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SLOWEST_START_SECONDS = 180
POLL_SECONDS = 0.02


class Forked:
    """One process, with as much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, channel: socket.socket, arguments: Sequence[str]) -> None:
        self._channel, self.args = channel, arguments
        self._lines = channel.makefile("r")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, minus the signal that ended it, or None while it runs."""
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self._lines.readline()))
            self._lines.close()
            self._channel.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status; subprocess.TimeoutExpired when it still runs after ``timeout`` seconds."""
        if self.returncode is None and not select.select([self._channel], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """SIGKILL to this process alone."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Template:
    """The process to fork from; it ends with this one."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        """Start it; ``variables`` are those that libraries read while they are imported."""
        self._address = str(folder / "template")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.template", self._address],
            cwd=REPOSITORY,
            env=variables,
            stdin=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the tests is theirs to pass on
        )
        deadline = time.monotonic() + SLOWEST_START_SECONDS
        while not Path(self._address).exists():
            assert self._process.poll() is None, "the template process ended while it imported"
            assert time.monotonic() < deadline, "the template process does not come up"
            time.sleep(POLL_SECONDS)

    def start(
        self, module: str, arguments: Sequence[str], variables: Mapping[str, str], stdout: Path, stderr: Path
    ) -> Forked:
        """``python -m module *arguments``, writing at the end of two files, which may be one."""
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(self._address)
        wish = {"module": module, "arguments": list(arguments), "variables": dict(variables)}
        wish |= {"stdout": str(stdout), "stderr": str(stderr)}
        channel.sendall(json.dumps(wish).encode() + b"\n")
        return Forked(channel, [module, *arguments])

    def close(self) -> None:
        """End it; its forks live on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(address: str) -> dict[str, Any] | None:
    """Fork for each wish; returns it in the fork, and None in the template at its end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + "~")
    listener.listen(64)
    os.rename(address + "~", address)
    running: dict[int, socket.socket] = {}
    while True:
        for ready in select.select([sys.stdin, listener], [], [], POLL_SECONDS)[0]:
            if ready is sys.stdin:
                return None
            channel = listener.accept()[0]
            wish = json.loads(channel.makefile("r").readline())
            pid = os.fork()
            if pid == 0:
                os.setsid()
                channel.sendall(f"{os.getpid()}\n".encode())
                for connection in (listener, channel, *running.values()):
                    connection.close()
                assert isinstance(wish, dict)
                return wish
            running[pid] = channel
        _tell_of_the_ended(running)


def _tell_of_the_ended(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as channel, contextlib.suppress(BrokenPipeError):  # nobody may wait for it any more
            channel.sendall(f"{status}\n".encode())


def become(wish: Mapping[str, Any]) -> None:
    """Turn this fork into what ``python -m`` would have started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(wish["variables"])
    sys.stdout.flush()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(wish[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv[:] = [wish["module"], *wish["arguments"]]
    runpy.run_module(wish["module"], run_name="__main__", alter_sys=True)


def _import_what_ranks_import() -> None:
    import deepspeed
    import megatron.core
    import torch.distributed.checkpoint

    import pretrain.inspect_checkpoint
    import pretrain.run

    del deepspeed, megatron, torch, pretrain
    gc.freeze()  # forks share these objects' pages as long as no collection walks over them


if __name__ == "__main__":
    _import_what_ranks_import()
    if (wished := serve(sys.argv[1])) is not None:
        become(wished)
