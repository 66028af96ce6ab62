"""What made a run: versions, git revision, launch. Kept in every checkpoint."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "deepspeed", "webdataset", "sentencepiece", "tensorboard", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on."""
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def git_revision() -> str | None:
    """Commit of the checkout this package runs from, with ``+changes`` if it was edited.

    Outside a checkout what the file ``.revision`` beside the package says, which a container's image has, or None.
    """
    here = Path(__file__).parent
    try:
        revision = _git(here, "rev-parse", "HEAD")
        return revision + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        recorded = here.parent / ".revision"
        return (recorded.read_text(encoding="utf-8").strip() if recorded.is_file() else "") or None


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
