"""What of a process's surroundings may be written down."""

import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.provenance import GIT
from pretrain.redaction import redact

_KEPT = re.compile(
    r"(SLURM|SBATCH|SRUN|NCCL|CUDA|NVIDIA|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|DS|DEEPSPEED|GLOO|UCX|FI|OMPI|PMI|PMIX|OMP|MKL"
    r"|KMP|MALLOC|PRETRAIN|MASTER|PYTHON|APPTAINER|SINGULARITY|ENROOT|PYXIS|LC)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV"
    r"|CONDA_PREFIX|LOADEDMODULES|HOSTNAME|HOME|USER|LANG|TMPDIR|PWD"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|COOKIE|AUTH|JWT", re.IGNORECASE)
_ASSIGNED_IN_A_LIST = re.compile(r"\b([A-Za-z_]\w*)=[^,]*")
_SECRET_ASSIGNED = re.compile(
    r"\b([A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|CREDENTIALS?|COOKIE|AUTH|JWT))=(\"[^\"]*\"|'[^']*'|[^\s,;]+)"
)
_CODE = ("pretrain", "megatron_ext", "tools", "configs", "slurm")
_UNTRACKED = (".py", ".yaml", ".sh", ".txt")
MOST_DIFF_BYTES = 1_000_000


def shown_environment(environment: Mapping[str, str] = os.environ) -> str:
    """``NAME=value`` a line, for the variables of launchers, libraries and paths; of all others the names alone.

    A list of what is shown, and not of what is hidden: nobody knows all names that secrets go by.
    """
    shown, hidden = [], []
    for name in sorted(environment):
        if _is_shown(name):
            shown.append(f"{name}={_without_assigned(redact(environment[name]))}")
        else:
            hidden.append(name)
    return "\n".join([*shown, "", "# set, values not recorded: " + " ".join(hidden), ""])


def _without_assigned(value: str) -> str:
    """A variable's value, such as sbatch's --export, in which other variables keep theirs by the same rule."""
    return _ASSIGNED_IN_A_LIST.sub(lambda found: found[0] if _is_shown(found[1]) else f"{found[1]}=***", value)


def _is_shown(name: str) -> bool:
    return bool(_KEPT.fullmatch(name)) and not _SECRET.search(name)


def without_secrets(text: str) -> str:
    """A script or a diff in which URLs have lost their logins, and variables named like secrets what is assigned."""
    return _SECRET_ASSIGNED.sub(r"\1=***", redact(text))


def job_script(environment: Mapping[str, str] = os.environ) -> str | None:
    """The text that was given to sbatch, :func:`without_secrets`; None outside a job.

    As Slurm knows it, else as the launcher kept it.
    """
    job = environment.get("SLURM_JOB_ID")
    if job and shutil.which("scontrol"):
        written = _output(["scontrol", "write", "batch_script", job, "-"])
        if written:
            return without_secrets(written)
    kept = environment.get("PRETRAIN_JOB_SCRIPT")
    if not kept:
        return None
    try:
        return without_secrets(Path(kept).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return f"# {kept} cannot be read: {error.strerror}\n"


def git_diff(checkout: Path = Path(__file__).parents[2]) -> str:
    """What a checkout, by default this package's, has changed since its commit, :func:`without_secrets`.

    New files of code and settings are in it, tracked or not. Empty outside a checkout.
    """
    git = [*GIT, "-C", str(checkout)]
    plain = ("--no-ext-diff", "--no-color")
    diff = _output([*git, "diff", *plain, "HEAD"])
    if diff is None:
        return ""
    for path in (_output([*git, "ls-files", "--others", "--exclude-standard", "-z", "--", *_CODE]) or "").split("\0"):
        if path.endswith(_UNTRACKED):
            # Its status is 1 where two files differ.
            diff += _output([*git, "diff", *plain, "--no-index", "--", os.devnull, path], good=(0, 1)) or ""
    diff = without_secrets(diff)
    return diff if len(diff) <= MOST_DIFF_BYTES else diff[:MOST_DIFF_BYTES] + "\n# cut off here\n"


def host() -> str:
    """Name of this machine."""
    return socket.gethostname()


def machine() -> str:
    """Host, kernel and processor in one line."""
    return f"{host()}, {platform.system()} {platform.release()}, {platform.machine()}"


def _output(command: list[str], good: Sequence[int] = (0,)) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode in good else None
