"""Where a run ran, and by which code."""

import os
from functools import cache

from pretrain.provenance import git_revision
from tools.bench.machine import this_machine

# Results and tables of a sweep change while it runs; they are not the code that made them.
_CODE = ("pretrain", "megatron_ext", "tools")


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
    """Revision of the code as it is now, see :func:`pretrain.provenance.git_revision`."""
    return git_revision(*_CODE)
