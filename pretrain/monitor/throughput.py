"""Tokens and model FLOPs a second, and the share of the GPUs' peak that they are (MFU)."""

import os
from dataclasses import dataclass

import torch

from megatron_ext import ModelSettings
from megatron_ext.flops import flops_per_token
from pretrain.hardware import gpu_named

GIB = 2**30
_PAGES = "/proc/self/statm"


@dataclass(frozen=True)
class Throughput:
    """What turns tokens per second into the other measures.

    Attributes:
        flops_per_token: model FLOPs of forward and backward, see :data:`megatron_ext.flops.CONVENTION`.
        gpus: that the run uses; processes, without GPUs.
        peak_tflops: of one, dense bf16, 10^12 FLOP/s; None if unknown.
    """

    flops_per_token: float
    gpus: int
    peak_tflops: float | None = None

    @classmethod
    def of(cls, model: ModelSettings, gpus: int, device: torch.device, peak_tflops: float | None) -> "Throughput":
        """Of a run; ``peak_tflops`` is the setting, else the GPU's own name decides."""
        if peak_tflops is None and device.type == "cuda":
            gpu = gpu_named(torch.cuda.get_device_name(device))
            peak_tflops = gpu.bf16_tflops if gpu else None
        return cls(flops_per_token(model).model, gpus, peak_tflops)

    def values(self, tokens_per_second: float) -> dict[str, float]:
        """Tag -> value."""
        tflops = tokens_per_second * self.flops_per_token / self.gpus / 1e12
        values = {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/tokens_per_second_per_gpu": tokens_per_second / self.gpus,
            "throughput/model_tflops_per_gpu": tflops,
        }
        return values | ({"throughput/mfu": tflops / self.peak_tflops} if self.peak_tflops else {})


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Tag -> GiB that this process holds; the GPU's is its peak since the last call."""
    values = {}
    with open(_PAGES, encoding="ascii") as pages:
        values["system/host_memory_gib"] = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    if device.type == "cuda":
        values["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        values["system/gpu_memory_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return values
