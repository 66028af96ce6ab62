"""What a process finds on its node before a run, and which of all processes' findings do not fit together."""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MOST_SKEW_SECONDS = 2.0
LEAST_FREE_SHARE = 0.9
"""Of a GPU's memory, before the run: what is missing is another process's."""


@dataclass(frozen=True)
class Facts:
    """One process's findings.

    Attributes:
        host: name of the node.
        versions: by package.
        gpus: how many torch sees here; ``gpus_given`` how many the batch system gave, None if it says nothing.
        gpu: kind of this process's own one, with its memory in bytes in total and free now.
        free: bytes on the disks where something will be written, by path.
        skew_seconds: this clock minus global rank 0's.
        shared_fault: why the run's folder is not the one that global rank 0 sees; empty if it is.
    """

    host: str
    versions: dict[str, str]
    gpus: int = 0
    gpus_given: int | None = None
    gpu: str = ""
    gpu_bytes: int = 0
    gpu_free: int = 0
    free: dict[str, int] = field(default_factory=dict)
    skew_seconds: float = 0.0
    shared_fault: str = ""


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that ``path``, or its first parent that exists, lies on."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def faults(found: Sequence[Facts], least_free: int) -> list[str]:
    """One line for each thing that is wrong, with the nodes that it is wrong on; empty when the run may start.

    Args:
        found: of all processes, in the order of their global ranks.
        least_free: bytes that every disk must have.
    """
    return [
        *_odd_versions(found),
        *_wrong_gpus(found),
        *_named(
            found,
            lambda facts: [
                f"only {free / 1e9:.1f} GB free in {path}, of {least_free / 1e9:.1f} GB for two checkpoints"
                for path, free in facts.free.items()
                if free < least_free
            ],
        ),
        *_named(found, lambda facts: [facts.shared_fault] if facts.shared_fault else []),
        *_named(
            found,
            lambda facts: (
                [f"its clock is {facts.skew_seconds:+.1f} s off; start its time service"]
                if abs(facts.skew_seconds) > MOST_SKEW_SECONDS
                else []
            ),
        ),
    ]


def usual(values: Iterable[T]) -> T:
    """The value that comes most often."""
    return Counter(values).most_common(1)[0][0]


def _odd_versions(found: Sequence[Facts]) -> list[str]:
    names = sorted({name for facts in found for name in facts.versions})
    usually = {name: usual(facts.versions.get(name, "none") for facts in found) for name in names}
    return _named(
        found,
        lambda facts: [
            f"{name} {facts.versions.get(name, 'none')}, but {usually[name]} elsewhere"
            for name in names
            if facts.versions.get(name, "none") != usually[name]
        ],
    )


def _wrong_gpus(found: Sequence[Facts]) -> list[str]:
    kind, memory = usual((facts.gpu, facts.gpu_bytes) for facts in found)

    def wrong(facts: Facts) -> list[str]:
        lines = []
        if facts.gpus_given is not None and facts.gpus != facts.gpus_given:
            lines.append(f"torch {facts.versions['torch']} sees {facts.gpus} GPU(s) of {facts.gpus_given}")
        if (facts.gpu, facts.gpu_bytes) != (kind, memory):
            lines.append(
                f"a GPU {facts.gpu or 'none'} with {facts.gpu_bytes / 2**30:.0f} GiB, but {kind or 'none'} with "
                f"{memory / 2**30:.0f} GiB elsewhere"
            )
        elif facts.gpu_free < LEAST_FREE_SHARE * facts.gpu_bytes:
            taken = (facts.gpu_bytes - facts.gpu_free) / 2**30
            lines.append(f"{taken:.0f} GiB of a GPU's {memory / 2**30:.0f} GiB are taken already")
        return lines

    return _named(found, wrong)


def _named(found: Sequence[Facts], wrong: Callable[[Facts], list[str]]) -> list[str]:
    """``HOST: FAULT`` once for each host, in the order of hosts; a fault of all hosts is one line."""
    lines = {(facts.host, line): None for facts in found for line in wrong(facts)}
    hosts = dict.fromkeys(facts.host for facts in found)
    of_all = {line for _, line in lines if all((host, line) in lines for host in hosts)} if len(hosts) > 1 else set()
    return [
        *(f"all nodes: {line}" for line in dict.fromkeys(line for _, line in lines) if line in of_all),
        *(f"{host}: {line}" for host, line in lines if line not in of_all),
    ]


def own_skew(reference: float) -> float:
    """Seconds by which this clock is ahead of ``reference``, global rank 0's as of just now."""
    return time.time() - reference
