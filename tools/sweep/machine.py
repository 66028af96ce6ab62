"""Where a run ran, and by which code."""

import os
import subprocess
from functools import cache
from pathlib import Path

from tools.bench.machine import this_machine

# Results and tables of a sweep change while it runs; they are not the code that made them.
_CODE = ("pretrain", "megatron_ext", "tools")
_ROOT = Path(__file__).parents[2]


def cores() -> int:
    """Logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def describe(threads: int) -> str:
    """The processor, and the threads of one run."""
    machine = this_machine()
    gpu = f"{machine.gpu}, " if machine.gpu else ""
    return f"{gpu}{machine.cpu} ({machine.instructions}), {machine.cores} cores, {threads} threads a run"


def code_revision() -> str | None:
    """Commit of the code as it is now, with ``+changes`` if it was edited; None outside a checkout."""
    try:
        revision = _git("rev-parse", "HEAD")
        return revision + ("+changes" if _git("status", "--porcelain", "--", *_CODE) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
