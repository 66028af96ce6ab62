"""The locks pin everything that pyproject.toml asks for, within its ranges."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "tools" / "locks").glob("py*.txt"))


def pins(lock: Path) -> dict[str, Version]:
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        assert not requirement.extras, line
        found[canonicalize_name(requirement.name)] = Version(pin.version)
    assert len(found) == len(lines), "a package is pinned twice"
    assert lines == sorted(lines, key=str.lower)
    return found


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert f"{project['name']}[hf,evaluate,browser]" in extras["dev"]
    lines = (
        *project["dependencies"],
        *(line for name in ("hf", "evaluate", "browser", "dev") for line in extras[name]),
    )
    return [requirement for line in lines if (requirement := Requirement(line)).name != project["name"]]


def test_there_is_a_lock_for_each_supported_python() -> None:
    assert [lock.name for lock in LOCKS] == ["py311.txt", "py312.txt"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
@pytest.mark.parametrize("requirement", wanted(), ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_within_its_range(lock: Path, requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins(lock)[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_pin_fits_any_build_of_its_version(lock: Path) -> None:
    assert [name for name, version in pins(lock).items() if version.local] == []


def test_both_pythons_get_the_same_versions() -> None:
    assert pins(LOCKS[0]) == pins(LOCKS[1])
