"""Forward and backward of the residual operations alone, on the CPU."""

import ctypes
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import Retraction, retract
from megatron_ext.kernels import Choice
from tools.bench import pairs
from tools.bench.report import table

NORM = "RMSNorm + sum, compiled"
RETRACTIONS = {
    "proj": Retraction(1.0, None, "output"),
    "geonorm": Retraction(math.inf, math.pi / 2, "output"),
}
ALPHA = 0.5
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def thread_counts(threads: int | None) -> list[int]:
    """What was asked for, else 1 and, where there are as many cores, 2."""
    return [threads] if threads else [count for count in (1, 2) if count <= len(os.sched_getaffinity(0))]


def run(shapes: Sequence[tuple[int, int]], rounds: int, counts: Sequence[int]) -> tuple[str, Any]:
    """The table and the results, for every shape, type and number of threads."""
    keep_freed_memory()
    rows, results, notes = [], [], []
    for count in counts:
        torch.set_num_threads(count)
        for dtype in (torch.float32, torch.bfloat16):
            for shape in shapes:
                timings = measure(shape, dtype, rounds)
                rows += table_rows(f"{shape[0]} x {shape[1]} {str(dtype)[6:]}, {count} threads", timings)
                results.append({"shape": shape, "dtype": str(dtype)[6:], "threads": count, "rows": _as_json(timings)})
                notes.append(pairs.doubt(timings, count))
    head = ["forward + backward", "ms", f"/ {NORM}", "95 %", "/ eager", "95 %", "cpu/wall"]
    return f"{table(head, rows)}\n\nrounds: {rounds}" + next((note for note in notes if note), ""), results


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, as torch's allocator for GPUs does; elsewhere nothing changes.

    By default it returns some large blocks to the system and not others. The page faults of the next, alike for all
    contenders, took up to half of the time here, and changed with the order of the contenders.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def measure(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> pairs.Rounds:
    """All contenders in turn."""
    contenders: dict[str, pairs.Turn] = {NORM: norm_and_sum(shape, dtype)}
    for name, retraction in RETRACTIONS.items():
        for kernels in ("compiled", "eager"):
            contenders[f"{name}, {kernels}"] = step(shape, dtype, retraction, kernels)
    for turn in contenders.values():
        for _ in range(3):
            turn()
    return pairs.interleave(contenders, rounds, rehearse=True)


def drawn(shape: tuple[int, int], dtype: torch.dtype, count: int, device: str = "cpu") -> list[Tensor]:
    """Standard normal tensors, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(count)]


def step(shape: tuple[int, int], dtype: torch.dtype, retraction: Retraction, kernels: Choice) -> pairs.Turn:
    """One step along the sphere and its gradients."""
    x, u, grad = drawn(shape, dtype, 3)
    inputs = [x.requires_grad_(), u.requires_grad_()]

    def turn() -> tuple[Tensor, ...]:
        return torch.autograd.grad(retract(x, u, ALPHA, retraction, kernels=kernels), inputs, grad)

    return turn


def norm_and_sum(shape: tuple[int, int], dtype: torch.dtype) -> pairs.Turn:
    """What a layer with norms does there: the sum goes on in the stream, its norm into the next sublayer."""
    x, u, grad_sum, grad_normed = drawn(shape, dtype, 4)
    gain = torch.ones(shape[1], dtype=dtype, requires_grad=True)
    inputs = [x.requires_grad_(), u.requires_grad_(), gain]

    def plain(x: Tensor, u: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        total = x + u
        return total, F.rms_norm(total, gain.shape, gain, 1e-5)

    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(plain, dynamic=False)

    def turn() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(*inputs), inputs, [grad_sum, grad_normed])

    return turn


def table_rows(title: str, timings: pairs.Rounds) -> list[list[str]]:
    """A title and a line for each contender."""
    lines = [[title, *[""] * 6]]
    for name, turns in timings.items():
        cells = [f"  {name}", f"{pairs.spread([turn.wall for turn in turns]).median * 1e3:.2f}"]
        for peer in (NORM, name.replace("compiled", "eager")):
            if peer == name or peer not in timings:
                cells += ["", ""]
                continue
            low, high = pairs.bounds(pairs.ratios(timings, name, peer))
            cells += [f"{pairs.ratio(timings, name, peer).median:.3f}", f"{low:.3f}-{high:.3f}"]
        lines.append([*cells, f"{pairs.cores_given(turns):.2f}"])
    return lines


def _as_json(timings: pairs.Rounds) -> dict[str, Any]:
    return {name: [dataclasses.asdict(turn) for turn in turns] for name, turns in timings.items()}
