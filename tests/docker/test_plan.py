"""What the image would be built from, without building it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docker.utils.build import exclude_paths
from dockerfile_parse import DockerfileParser

from tests.launch import REPOSITORY

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
LOCKS = "tools/locks"


def let_through(folder: Path) -> set[str]:
    """The paths below ``folder`` that the project's .dockerignore lets into a build, by Docker's rules."""
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return set(exclude_paths(str(folder), patterns, dockerfile="docker/Dockerfile"))


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    parser = DockerfileParser(path=str(tmp_path_factory.mktemp("parsed")))
    parser.content = DOCKERFILE.read_text(encoding="utf-8")
    return list(parser.structure)


def values(instructions: list[dict[str, Any]], name: str) -> list[str]:
    return [instruction["value"] for instruction in instructions if instruction["instruction"] == name]


def test_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_stage_is_used(instructions: list[dict[str, Any]]) -> None:
    stages = [re.fullmatch(r"(\S+) AS (\S+)", value) for value in values(instructions, "FROM")]
    bases, names = zip(*(stage.groups() for stage in stages if stage), strict=True)
    assert len(names) == len(stages)
    copied = re.findall(r"--from=(\S+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert bases[0] == "${BASE_IMAGE}"
    for at, base in enumerate(bases[1:], start=1):
        assert base in names[:at], "a base image beside BASE_IMAGE"
    assert {*bases[1:], *copied} == {*names[:-1]}


def test_every_source_is_in_the_build(instructions: list[dict[str, Any]]) -> None:
    context = let_through(REPOSITORY)
    sources = [value.split() for value in values(instructions, "COPY") if not value.startswith("--from")]
    assert [LOCKS, LOCKS] in sources
    assert [".", "."] in sources
    for words in sources:
        for source in words[:-1]:
            assert source == "." or source in context


def test_base_and_arguments_are_pinned(instructions: list[dict[str, Any]]) -> None:
    arguments = dict(value.partition("=")[::2] for value in values(instructions, "ARG"))
    before_first_stage = DOCKERFILE.read_text(encoding="utf-8").partition("\nFROM ")[0]
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", before_first_stage, re.MULTILINE)
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)
    assert set(arguments) == {"BASE_IMAGE", "USER_ID", "PIP_EXTRA_INDEX_URL", "REVISION"}
    assert not values(instructions, "ADD"), "an ADD fetches what it likes"


def test_what_changes_often_comes_last(instructions: list[dict[str, Any]]) -> None:
    """Only the locks and set-up stand before the packages; the sources come after them; the revision last of all."""
    order = [f"{instruction['instruction']} {instruction['value']}" for instruction in instructions]
    packages = next(at for at, line in enumerate(order) if "tools/setup.sh packages" in line)
    assert [line for line in order[:packages] if line.startswith("COPY")] == [
        "COPY tools/setup.sh tools/setup.sh",
        f"COPY {LOCKS} {LOCKS}",
    ]
    sources, revision = order.index("COPY . ."), next(at for at, line in enumerate(order) if "ARG REVISION" in line)
    assert order.index("COPY --from=packages /opt/sphere-pretrain/.venv .venv") < sources < revision
    assert not [line for line in order[revision:] if line.startswith("COPY")]


def test_it_runs_the_smoke_command_as_a_user(instructions: list[dict[str, Any]]) -> None:
    assert values(instructions, "USER") == ["${USER_ID}"]
    assert re.search(r"^ARG USER_ID=[1-9]\d*$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    (command,) = values(instructions, "CMD")
    assert json.loads(command)[:5] == ["python", "-m", "pretrain", "plan", "configs/demo.yaml"]


SECRET_OR_OURS = (
    *(".git/config", ".env", ".venv/bin/python", ".cache/setup.log", "id_ed25519", "pip.conf", "notes.txt"),
    *("runs/demo/config.yaml", "data/mine/documents.jsonl", "exported/model.safetensors", "build/lib/x.py"),
    *("slurm/site.sh", "slurm-7b-12.out", ".job-12.sh", "tools/.env", "tools/.env.local", "tools/.netrc"),
    *("pretrain/data/id_rsa", "pretrain/server.key", "configs/.aws/credentials", "tests/.ssh/known_hosts"),
    *("pretrain/__pycache__/loop.cpython-311.pyc", "tests/.pytest_cache/README.md", "tools/pip.conf"),
)
WANTED = (
    *("pretrain/loop.py", "pretrain/data/feed.py", "configs/demo.yaml", "tests/servers/localhost.pem"),
    *("tools/locks/py312.txt", "slurm/launcher.sh", "pyproject.toml", "README.md", "LICENSE"),
)


def test_secrets_runs_and_history_stay_out(tmp_path: Path) -> None:
    for name in (*SECRET_OR_OURS, *WANTED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    got = {path for path in let_through(tmp_path) if (tmp_path / path).is_file()}
    assert got == set(WANTED)


def test_all_of_the_code_gets_in() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    tracked = {name for name in done.stdout.split("\0") if name and (REPOSITORY / name).exists()}
    left_out = {name.partition("/")[0] for name in tracked - let_through(REPOSITORY) if "docker" not in name}
    assert left_out == {".ci", ".gitignore"}
