"""How a job's processes tell the script that started them what to do when they have ended.

The exit status alone does not say it: srun ends the other processes when the first one ends, and then reports the
signal that ended those.
"""

import os
from collections.abc import Mapping
from pathlib import Path

REQUEUE_STATUS = 75
"""Exit status of a process that did not fail and wants to be started again (EX_TEMPFAIL of sysexits.h)."""
VARIABLE = "PRETRAIN_VERDICT"
"""Environment variable with the path of the file, on a file system that all nodes share."""


def leave_verdict(requeue: bool, reason: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write ``requeue: REASON`` or ``failed: REASON``, if the launcher asks for it and no process was faster.

    The first is the cause; what the others say may be its consequence.
    """
    _leave("requeue" if requeue else "failed", reason, environment)


def leave_end(environment: Mapping[str, str] = os.environ) -> None:
    """Write ``ended: in order``: srun's status is 0 too when the batch system ended the processes before they could."""
    _leave("ended", "in order", environment)


def _leave(verdict: str, reason: str, environment: Mapping[str, str]) -> None:
    if not environment.get(VARIABLE):
        return
    path = Path(environment[VARIABLE])
    text = f"{verdict}: {' '.join(reason.split())}\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return
    except OSError as error:  # the file system may be why the run ends; the exit status still tells
        print(f"warning: {path}: cannot tell the launcher ({text.strip()}): {error.strerror}", flush=True)
