"""What a benchmark ran on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """The machine and the software that decide a timing.

    Attributes:
        cpu: the processor's name.
        instructions: the widest vector instructions that torch uses.
        cores: logical CPUs that this process may use.
        threads: that torch computes with.
        memory_gib: of the machine.
        load_average: processes that wanted a CPU over the last minute; others' work disturbs a timing.
        gpu: its name, None without CUDA.
        gpu_memory_gib: None without CUDA.
    """

    cpu: str
    instructions: str
    cores: int
    threads: int
    memory_gib: float
    load_average: float
    gpu: str | None
    gpu_memory_gib: float | None
    system: str
    python: str
    torch: str

    def __str__(self) -> str:
        gpu = f"{self.gpu} ({self.gpu_memory_gib} GiB), " if self.gpu else ""
        return (
            f"{gpu}{self.cpu} ({self.instructions}), {self.threads} threads on {self.cores} cores, "
            f"{self.memory_gib} GiB, torch {self.torch}; load average before the start {self.load_average}"
        )


def this_machine() -> Machine:
    """Describe the machine as it is now: call it before the work whose load would be counted."""
    cuda = torch.cuda.is_available()
    return Machine(
        cpu=_cpu_name(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_gib=_gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        load_average=round(os.getloadavg()[0], 2),
        gpu=torch.cuda.get_device_name() if cuda else None,
        gpu_memory_gib=_gib(torch.cuda.get_device_properties(0).total_memory) if cuda else None,
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _cpu_name() -> str:
    """The kernel's name for the first processor; some architectures have none there."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gib(size: int) -> float:
    return round(size / 2**30, 1)
