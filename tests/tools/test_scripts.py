"""The shell scripts beside Slurm's: shellcheck finds nothing, and no pipe fails by chance."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

SCRIPTS = [*sorted((REPOSITORY / "tools").glob("*.sh")), *sorted(REPOSITORY.glob(".ci/*"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-x", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_pipe_ends_before_what_feeds_it(script: Path) -> None:
    """Under pipefail a writer that its reader has left fails the pipe, or not, by chance."""
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert re.findall(r"\| *(?:grep +-\w*q|head)\b.*", text) == []
