"""The kernels on a GPU: errors against fp64, and how much of a copy's bandwidth they reach."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext import Retraction, retract
from megatron_ext.kernels import Branch, Choice, Turn, kernels_of, resolve
from tools.bench.residual_timing import ALPHA, RETRACTIONS, drawn

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative error of an output or a gradient."""

_FLUSHED = 2**29
"""Bytes that the turns of one measurement touch at least: more than any GPU's cache."""

_REPLAYS = 15


@dataclass(frozen=True)
class Bandwidth:
    """Of one pass over one shape.

    Attributes:
        seconds: of one pass.
        of_copy: bytes that it has to move, per second, over those of a copy of the same rows.
    """

    seconds: float
    of_copy: float


def runnable(device: torch.device) -> list[Choice]:
    """The implementations that work on the device."""
    names: list[Choice] = ["eager", "compiled", "triton"]
    return [name for name in names if _works(name, device)]


def _works(name: Choice, device: torch.device) -> bool:
    try:
        return resolve(name, device.type)[0] == name
    except ValueError:
        return False


def parity(kernels: Choice, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]) -> float:
    """Largest relative error of a step and its gradients against the eager kernels in fp64, over the retractions."""
    learning = {"p = 3.5, learned": Retraction(3.5, 0.9)}
    errors = []
    for retraction in (RETRACTIONS | learning).values():
        learned = retraction.save == "update"
        expected = _outcome("eager", torch.float64, device, shape, retraction, learned)
        got = _outcome(kernels, dtype, device, shape, retraction, learned)
        errors += [float((a - e).norm() / e.norm()) for a, e in zip(got, expected, strict=True)]
    return largest(errors)


def largest(errors: Sequence[float]) -> float:
    """NaN where one is: `max` would keep what stands before it."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def _outcome(
    kernels: Choice,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    retraction: Retraction,
    learned: bool,
) -> list[Tensor]:
    """In fp64, from inputs that bf16 holds."""
    x, u, grad = (tensor.to(dtype) for tensor in drawn(shape, torch.bfloat16, 3, device.type))
    alpha: float | Tensor = ALPHA
    inputs = [x.requires_grad_(), u.requires_grad_()]
    if learned:
        alpha = torch.tensor([ALPHA], device=device, requires_grad=True)
        inputs.append(alpha)
    y = retract(x, u, alpha, retraction, kernels=kernels)
    return [tensor.detach().double() for tensor in (y, *torch.autograd.grad(y, inputs, grad))]


def bandwidths(
    kernels: Choice, retraction: Retraction, device: torch.device, shape: tuple[int, int]
) -> dict[str, Bandwidth]:
    """Forward and backward pass in bf16, each without the graph around it."""
    size = 2 * math.prod(shape)
    sets = _FLUSHED // (3 * size) + 2 if device.type == "cuda" else 2
    generator = torch.Generator(device).manual_seed(0)
    states = [
        [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(3)] for _ in range(sets)
    ]
    chosen = kernels_of(kernels, states[0][0])
    turn = Turn(ALPHA, 1.0, retraction)
    steps = [chosen.step(x, Branch(u), turn) for x, u, _ in states]

    def forward(index: int) -> Any:
        x, u, _ = states[index]
        return chosen.step(x, Branch(u), turn)

    def backward(index: int) -> Any:
        x, _, grad = states[index]
        step = steps[index]
        return chosen.step_back(grad, x, Branch(step.state), step[1:], turn, (False, False))

    def copy(index: int) -> Any:
        return states[index][0].clone()

    copied = 2 * size / _seconds(copy, sets, device)
    # Forward: x, u, y. Backward with the output saved: x, y, the gradient, and two gradients out.
    result = {}
    for name, work, passes in (("forward", forward, 3), ("backward", backward, 5)):
        seconds = _seconds(work, sets, device)
        result[name] = Bandwidth(seconds, passes * size / seconds / copied)
    return result


def _seconds(work: Callable[[int], Any], sets: int, device: torch.device) -> float:
    """Of one turn, the median of several rounds over all sets; on a GPU as a graph, without Python's time."""
    if device.type != "cuda":
        return _clocked(work, sets)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept until the end: written over at once, a result might never leave the cache.
        results = [work(index) for index in range(sets)]
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / sets)
    del results
    return _median(times)


def _clocked(work: Callable[[int], Any], sets: int) -> float:
    work(0)
    start = time.perf_counter()
    for index in range(sets):
        work(index)
    return (time.perf_counter() - start) / sets


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
