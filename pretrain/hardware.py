"""GPUs: what their makers promise. Plans and measures of utilisation read the same table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        bf16_tflops: peak of dense bf16 matrix products with fp32 accumulation, 10^12 FLOP/s, without sparsity.
        memory_gib: that CUDA gives to programs, GiB; a little less than on the box.
        per_node: GPUs of a usual machine.
        link_gb: to the other GPUs of the machine, 10^9 bytes/s in each direction: half of what makers print.
        source: of the peak and the link.
    """

    name: str
    bf16_tflops: float
    memory_gib: float
    per_node: int
    link_gb: float
    source: str


_NVIDIA = "NVIDIA's data sheet"
_TABLE = (
    Gpu("a100-40", 312, 39.4, 8, 300, f"{_NVIDIA} A100 SXM"),
    Gpu("a100-80", 312, 79.1, 8, 300, f"{_NVIDIA} A100 SXM"),
    Gpu("h100", 989, 79.1, 8, 450, f"{_NVIDIA} H100 SXM (1979 with sparsity)"),
    Gpu("h100-pcie", 756, 79.1, 8, 64, f"{_NVIDIA} H100 PCIe (1513 with sparsity)"),
    Gpu("h200", 989, 139.8, 8, 450, f"{_NVIDIA} H200 SXM (1979 with sparsity)"),
    Gpu("gh200", 990, 94.5, 4, 450, f"{_NVIDIA} GH200, 96 GB"),
    Gpu("b200", 2250, 178.3, 8, 900, f"{_NVIDIA} DGX B200 (36 PFLOP/s of 8, with sparsity)"),
    Gpu("l40s", 362, 44.4, 8, 32, f"{_NVIDIA} L40S (733 with sparsity)"),
    Gpu("l4", 121, 22.0, 8, 32, f"{_NVIDIA} L4 (242 with sparsity)"),
    Gpu("a10", 125, 22.1, 4, 32, f"{_NVIDIA} A10"),
    Gpu("4090", 165, 23.5, 8, 32, "NVIDIA's white paper on Ada, RTX 4090"),
    Gpu("3090", 71, 23.6, 8, 32, "NVIDIA's white paper on Ampere GA102, RTX 3090"),
    Gpu("mi300x", 1307, 191.7, 8, 448, "AMD's data sheet MI300X"),
)

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
"""By the name that command lines take."""

_MADE_OF = {
    "a100-40": ("a100", "40gb"),
    "a100-80": ("a100",),
    "h100-pcie": ("h100", "pcie"),
    "h100": ("h100",),
    "h200": ("h200",),
    "gh200": ("gh200",),
    "b200": ("b200",),
    "l40s": ("l40s",),
    "l4": ("l4",),
    "a10": ("a10",),
    "4090": ("rtx", "4090"),
    "3090": ("rtx", "3090"),
    "mi300x": ("mi300x",),
}
"""Words of the name that the driver gives; the first kind all of whose words occur is it."""


def gpu_named(device_name: str) -> Gpu | None:
    """The kind of a GPU by the driver's name, for example "NVIDIA A100-SXM4-80GB"; None if the table lacks it."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    return next((GPUS[kind] for kind, needed in _MADE_OF.items() if set(needed) <= set(words)), None)


NETWORK_GB = 25.0
"""Between machines, 10^9 bytes/s in each direction: an assumption, an adapter of 200 Gbit/s for each GPU."""

DEFAULT_GPU = "h100"

DEFAULT_MFU = 0.4
"""Model FLOPs over the peak's: Megatron-LM's 1.7 B on 48 H100 and nanotron's 1.3 B on 8 publish 41 % and 44 %."""
