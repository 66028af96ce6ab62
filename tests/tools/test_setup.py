"""tools/setup.sh on systems where something is missing: what it says and what it would run."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "env", "head", "mkdir", "rm", "sh", "tail", "touch", "tr", "flock", "dirname")


class Machine:
    """A copy of the project, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.project = folder / "project"
        self.bin.mkdir()
        (self.project / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "setup.sh", self.project / "tools")
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None
            (self.bin / tool).symlink_to(path)

    def add(self, name: str, script: str) -> Path:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        return program

    def add_python(self, version: tuple[int, int], missing: str = "") -> Path:
        """A python of Debian's of that version; ``missing`` is a word in the one question it fails."""
        fail = f"*{missing}*) exit 1;; " if missing else ""
        return self.add(
            f"python{version[0]}.{version[1]}",
            f"case \"$*\" in {fail}*'not in'*) exit {0 if version in ((3, 11), (3, 12)) else 1};; "
            f"*base_prefix*) echo /usr;; *%d*) echo {version[0]}.{version[1]};; esac",
        )

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", self.project / "tools" / "setup.sh"],
            env={"PATH": str(self.bin), **environment},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.add("id", "echo 1000")
    machine.add("apt-get", f'echo "$@" >>{tmp_path}/apt.log')
    return machine


def test_a_user_gets_the_line_that_installs_what_is_missing(machine: Machine) -> None:
    machine.add_python((3, 12), missing="ensurepip")
    result = machine.setup()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert "sudo apt-get install -y --no-install-recommends python3.12-venv g++\n" in result.stderr
    assert not (machine.bin.parent / "apt.log").exists()


def test_a_system_without_python_gets_debians(machine: Machine) -> None:
    result = machine.setup()
    assert result.stderr.endswith("python3 python3-venv python3-dev g++\n")


def test_headers_are_asked_for(machine: Machine) -> None:
    machine.add_python((3, 11), missing="Python.h")
    machine.add("g++", "")
    assert machine.setup().stderr.endswith(" python3.11-dev\n")


def test_root_installs_what_is_missing(machine: Machine) -> None:
    machine.add("id", "echo 0")
    machine.add_python((3, 11), missing="ensurepip")
    machine.add("g++", "")
    result = machine.setup()
    # The stub installs nothing, and set-up notices.
    assert "still lacks venv\n" in result.stderr
    log = (machine.bin.parent / "apt.log").read_text(encoding="utf-8").splitlines()
    assert log[-1] == "install -y --no-install-recommends python3.11-venv"


def test_a_complete_interpreter_wins_over_an_earlier_incomplete_one(machine: Machine) -> None:
    machine.add_python((3, 11), missing="ensurepip")
    chosen = machine.add_python((3, 12))
    machine.add("g++", "")
    assert f".venv with Python 3.12 ({chosen})" in machine.setup().stdout


def test_an_interpreter_of_another_version_is_refused(machine: Machine) -> None:
    other = machine.add_python((3, 13))
    result = machine.setup(PYTHON=str(other))
    assert result.returncode == 1
    assert result.stderr == f"error: PYTHON={other} is not a working Python 3.11 or 3.12\n"


def test_a_foreign_environment_is_not_destroyed(machine: Machine) -> None:
    machine.add_python((3, 11))
    machine.add("g++", "")
    theirs = machine.project / ".venv" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.symlink_to(machine.add_python((3, 10)))
    result = machine.setup()
    assert "was not made by this script and does not fit; remove it" in result.stderr
    assert theirs.is_symlink()


def test_what_a_link_points_to_is_not_emptied(machine: Machine, tmp_path: Path) -> None:
    machine.add_python((3, 11))
    machine.add("g++", "")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (machine.project / ".venv").symlink_to(tmp_path / "elsewhere")
    done = machine.setup()
    assert done.returncode == 1
    assert ".venv is a symbolic link, and set-up would empty what it points to; remove it" in done.stderr
    assert (tmp_path / "elsewhere" / "kept").exists()
