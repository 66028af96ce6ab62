"""What of a process's surroundings may be written down."""

import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pretrain.redaction import redact

_KEPT = re.compile(
    r"(SLURM|SBATCH|SRUN|NCCL|CUDA|NVIDIA|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|DS|DEEPSPEED|GLOO|UCX|FI|OMPI|PMI|PMIX|OMP|MKL"
    r"|KMP|MALLOC|PRETRAIN|MASTER|PYTHON|APPTAINER|SINGULARITY|ENROOT|PYXIS|LC)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV"
    r"|CONDA_PREFIX|LOADEDMODULES|HOSTNAME|HOME|USER|LANG|TMPDIR|PWD"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE|AUTH", re.IGNORECASE)
MOST_DIFF_BYTES = 1_000_000


def shown_environment(environment: Mapping[str, str] = os.environ) -> str:
    """``NAME=value`` a line, for the variables of launchers, libraries and paths; of all others the names alone.

    A list of what is shown, and not of what is hidden: nobody knows all names that secrets go by.
    """
    shown, hidden = [], []
    for name in sorted(environment):
        if _KEPT.fullmatch(name) and not _SECRET.search(name):
            shown.append(f"{name}={redact(environment[name])}")
        else:
            hidden.append(name)
    return "\n".join([*shown, "", "# set, values not recorded: " + " ".join(hidden), ""])


def job_script(environment: Mapping[str, str] = os.environ) -> str | None:
    """The text that was given to sbatch: as Slurm knows it, else as the launcher kept it; None outside a job."""
    job = environment.get("SLURM_JOB_ID")
    if job and shutil.which("scontrol"):
        written = _output(["scontrol", "write", "batch_script", job, "-"])
        if written:
            return written
    kept = environment.get("PRETRAIN_JOB_SCRIPT")
    if not kept:
        return None
    try:
        return Path(kept).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"# {kept} cannot be read: {error.strerror}\n"


def git_diff() -> str:
    """What the checkout that this package runs from has changed since its commit; empty outside a checkout."""
    diff = _output(["git", "-C", str(Path(__file__).parent), "diff", "HEAD"]) or ""
    return diff if len(diff) <= MOST_DIFF_BYTES else diff[:MOST_DIFF_BYTES] + "\n# cut off here\n"


def host() -> str:
    """Name of this machine."""
    return socket.gethostname()


def machine() -> str:
    """Host, kernel and processor in one line."""
    return f"{host()}, {platform.system()} {platform.release()}, {platform.machine()}"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
