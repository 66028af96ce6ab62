"""What made a run: versions, git revision, launch. Kept in every checkpoint."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "deepspeed", "webdataset", "sentencepiece", "tensorboard", "numpy")


GIT = ("git", "-c", "safe.directory=*")
"""A container may run as another user than the one who owns the checkout that it sees; nothing of that is run here."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on."""
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def git_revision(*folders: str) -> str | None:
    """Commit of the checkout this package runs from, with ``+changes`` if it was edited.

    Outside a checkout what the file ``.revision`` beside the package says, which a container's image has, or None.

    Args:
        folders: whose changes count, new files included; else those of all tracked files.
    """
    root = Path(__file__).parents[1]
    counted = ("--", *folders) if folders else ("--untracked-files=no",)
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return revision + ("+changes" if _git(root, "status", "--porcelain", *counted) else "")
    except (OSError, subprocess.CalledProcessError):
        recorded = root / ".revision"
        return (recorded.read_text(encoding="utf-8").strip() if recorded.is_file() else "") or None


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        [*GIT, "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
