"""The image, built on a plain Debian and used as a user would; no network once it is built.

NOT RUN: NGC's base images and GPUs. A Debian with a torch of its own stands for the former.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import Engine
from tests.launch import REPOSITORY
from tools.demo_report import CLEARLY_BELOW

pytestmark = [pytest.mark.container, pytest.mark.slow]

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
IMAGE = "localhost/sphere-pretrain:cpu"
FAST = "not slow and not gpu and not slurm and not triton and not browser and not dist"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    built = engine.build(IMAGE, file=DOCKERFILE)
    assert "compiling its CPU communication extension" in built
    return IMAGE


@pytest.mark.parametrize("options", [(), ("--user=4321:4321", "--env=HOME=/tmp", "--read-only")])
def test_the_smoke_command(engine: Engine, image: str, options: tuple[str, ...]) -> None:
    """As the image's user; and as anybody else, with nothing to write to, as apptainer runs it."""
    said = engine.run(image, options=options)
    assert "geonorm, 4,262,144 parameters, vocabulary 2,048" in said
    assert re.search(r"^  total +\d.* fits: ", said, re.MULTILINE), said


def test_it_runs_as_a_user_who_can_change_runs_alone(engine: Engine, image: str) -> None:
    script = (
        "id -u; find /opt /usr /etc /mnt -xdev -writable -not -type l 2>/dev/null; command -v g++ || echo no compiler"
    )
    assert engine.run(image, "bash", "-c", script).split("\n")[:-1] == [
        *("10001", "/opt/sphere-pretrain/data", "/opt/sphere-pretrain/runs", "no compiler")
    ]
    assert engine.run(image, "bash", "tools/setup.sh") == "set-up: .venv is up to date\n"


def test_another_revision_is_a_matter_of_the_last_layers(engine: Engine, image: str) -> None:
    rebuilt = engine.build(IMAGE, "--build-arg", "REVISION=0123abcd", file=DOCKERFILE)
    assert "set-up:" not in rebuilt
    assert rebuilt.count("Using cache") > 10
    script = "from pretrain.provenance import git_revision; print(git_revision())"
    assert engine.run(image, "python", "-c", script) == "0123abcd\n"


def test_nothing_of_this_machine_stays(engine: Engine, image: str) -> None:
    words = [word for word in (*engine.private, str(REPOSITORY)) if word != "pypi.org"]
    remembered = engine.podman("history", "--no-trunc", image) + engine.podman("inspect", image)
    assert [word for word in words if word in remembered] == []
    patterns = [argument for word in words for argument in ("-e", word)]
    search = (
        "grep",
        "-rlIF",
        "--devices=skip",
        *patterns,
        "/etc",
        "/home",
        "/mnt",
        "/opt",
        "/root",
        "/usr/local",
        "/var",
    )
    assert engine.podman("run", "--rm", "--user=0", "--network=none", image, *search, check=False) == ""
    assert (
        engine.run(image, "bash", "-c", "find runs data -mindepth 1; ls /etc/pip.conf .git .cache 2>&1 | wc -l")
        == "3\n"
    )


def test_the_demo(engine: Engine, image: str) -> None:
    said = engine.run(image, "bash", "tools/demo.sh", "train.steps=60", timeout=1800)
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if re.match(r"runs/demo/\w+ +60 ", line)}
    assert set(rows) == {"runs/demo/geonorm", "runs/demo/pre_norm"}
    for _, _, validation, entropy in rows.values():
        assert float(validation) < CLEARLY_BELOW * float(entropy)


def test_the_tests(engine: Engine, image: str) -> None:
    """Bash, as the first process, buries what killed programs leave."""
    script = f"python -m pytest -q -p no:cacheprovider -m '{FAST}'; exit $?"
    said = engine.run(image, "bash", "-c", script, timeout=3600)
    assert re.search(r"\d{4} passed", said.splitlines()[-1]), said[-2000:]


def test_the_base_images_own_torch_is_kept(engine: Engine) -> None:
    """In the whole image: pip is at work in its last part too, where the base's constraints must not hold either."""
    base, built = "localhost/with-torch:test", "localhost/with-torch:image"
    engine.build(base, file=Path(__file__).with_name("with_torch.Dockerfile"))
    said = engine.build(built, file=DOCKERFILE, base=base)
    assert "set-up: torch==" not in said
    script = """import numpy, torch, deepspeed; from importlib.metadata import version
print(torch.__file__, version("torch"), numpy.__version__)"""
    assert engine.run(built, ".venv/bin/python", "-c", script).splitlines()[-1].split() == [
        *("/usr/local/lib/python3.11/dist-packages/torch/__init__.py", "2.13.0a0+nv26.7", "2.4.6")
    ]
