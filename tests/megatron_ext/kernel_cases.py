"""Every implementation of the kernels against the eager one in fp64; as a program, those of Triton."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.kernels import Choice
from megatron_ext.mlp import swiglu
from megatron_ext.retraction import Retraction, retract

SAVED_UPDATE = [
    Retraction(),
    Retraction(1.0),
    Retraction(2.0, 1.5),
    Retraction(3.5, 0.9),
]
SAVED_OUTPUT = [Retraction(1.0, None, "output"), Retraction(math.inf, math.pi / 2, "output")]
WAYS: list[tuple[Retraction, bool, bool]] = [
    *((retraction, learned, learned) for retraction in SAVED_UPDATE for learned in (False, True)),
    *((retraction, False, busy) for retraction in SAVED_OUTPUT for busy in (False, True)),
]
"""(retraction, step size and scale are learned, with bias and dropout)."""


def outcome(
    kernels: Choice,
    dtype: torch.dtype,
    way: tuple[Retraction, bool, bool],
    shape: tuple[int, ...] = (5, 2, 72),
    step_size: float = 0.7,
) -> dict[str, Tensor]:
    """Output and gradients in fp64, from inputs that bf16 holds; the first row's update is zero, the last state is."""
    retraction, learned, busy = way
    generator = torch.Generator().manual_seed(0)
    x, u, g, bias = (torch.randn(size, generator=generator).bfloat16() for size in (shape, shape, shape, shape[-1:]))
    spread = torch.linspace(0, 1.5, shape[0] * shape[1]).view(*shape[:2], 1)
    x, u, bias = x * (spread < 1.5), (u * spread).bfloat16(), bias / 8
    kept = torch.rand(shape, generator=generator) > 0.3 if busy else None
    device = "cuda" if kernels != "eager" and torch.cuda.is_available() else "cpu"
    inputs = {"x": x, "u": u} | ({"bias": bias} if busy else {})
    inputs = {name: tensor.to(device, dtype).requires_grad_() for name, tensor in inputs.items()}
    numbers: dict[str, Any] = {"step size": step_size, "scale": 1.2}
    if learned:
        numbers = {name: torch.tensor([number], device=device, requires_grad=True) for name, number in numbers.items()}
        inputs |= numbers
    y = retract(
        *(inputs["x"], inputs["u"], numbers["step size"], retraction, numbers["scale"]),
        bias=inputs.get("bias"),
        kept=None if kept is None else kept.to(device),
        dropout=0.3 if busy else 0.0,
        kernels=kernels,
    )
    gradients = torch.autograd.grad(y, list(inputs.values()), g.to(y))
    return {name: tensor.detach().cpu().double() for name, tensor in zip(("y", *inputs), (y, *gradients), strict=True)}


def errors(
    kernels: Choice, dtype: torch.dtype, ways: list[tuple[Retraction, bool, bool]]
) -> Iterator[tuple[str, float]]:
    """Relative error of each output and gradient."""
    for way in ways:
        expected = outcome("eager", torch.float64, way)
        for name, value in outcome(kernels, dtype, way).items():
            yield f"{name} of {way} in {dtype}", float((value - expected[name]).norm() / expected[name].norm())


def swiglu_errors(kernels: Choice, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """As :func:`errors`."""
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if kernels != "eager" and torch.cuda.is_available() else "cpu"
    hidden, grad = (torch.randn(3, 2, width, generator=generator).bfloat16() for width in (2 * 1100, 1100))
    parts = []
    for kind, where, choice in ((torch.float64, "cpu", "eager"), (dtype, device, kernels)):
        z = hidden.to(where, kind).requires_grad_()
        y = swiglu(z, None, choice)
        parts.append([y.detach(), *torch.autograd.grad(y, z, grad.to(y))])
    for name, expected, value in zip(("y", "z"), *parts, strict=True):
        yield f"{name} of SwiGLU in {dtype}", float((value.cpu().double() - expected).norm() / expected.norm())


# The interpreter cuts fp32 off where it should round to bf16.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def check(
    kernels: Choice,
    ways: list[tuple[Retraction, bool, bool]],
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> int:
    """Assert that every error is within what the type rounds; returns how many were looked at."""
    looked_at = 0
    for dtype in dtypes:
        for what, error in (*errors(kernels, dtype, ways), *swiglu_errors(kernels, dtype)):
            assert error < TOLERANCES[dtype], f"{what}: {error}"
            looked_at += 1
    return looked_at


def check_triton_alone() -> None:
    """Strided rows, rows wider than a block of any type, sums that never change, and numbers that are not learned."""
    wide = torch.randn(3, 2 * 300)
    views = outcome_of_views(wide[:, :300], wide[:, 300:])
    copies = outcome_of_views(wide[:, :300].contiguous(), wide[:, 300:].contiguous())
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))
    again = [outcome("triton", torch.float32, WAYS[1]) for _ in range(2)]
    assert all(torch.equal(again[0][name], again[1][name]) for name in again[0])
    check_numbers_that_are_frozen()
    x = torch.randn(1, 16384)
    y = retract(x, torch.randn(1, 16384), 0.5, Retraction(), kernels="triton")
    torch.testing.assert_close(y.norm(), x.norm())
    with pytest.raises(ValueError, match="rows of 16385 are wider than 16384"):
        retract(torch.randn(1, 16385), torch.randn(1, 16385), 0.5, Retraction(), kernels="triton")


def check_numbers_that_are_frozen() -> None:
    """Step size and scale may be tensors without a gradient: the backward pass then writes none, over the state least
    of all."""
    for wanted in ((False, False), (False, True), (True, False)):
        results = []
        for kernels in ("eager", "triton"):
            generator = torch.Generator().manual_seed(0)
            x, u = (torch.randn(5, 72, generator=generator, requires_grad=True) for _ in range(2))
            numbers = [torch.tensor([0.7], requires_grad=wanted[0]), torch.tensor([1.2], requires_grad=wanted[1])]
            y = retract(x, u, numbers[0], Retraction(2.0), numbers[1], kernels=kernels)
            (y.square().sum() + y.sum()).backward()
            results.append([x, u, y, *(tensor.grad for tensor in (x, u, *numbers) if tensor.requires_grad)])
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-4)


def outcome_of_views(x: Tensor, u: Tensor) -> list[Tensor]:
    """By Triton, of rows that may lie in a larger matrix."""
    inputs = [tensor.detach().requires_grad_() for tensor in (x, u)]
    y = retract(*inputs, 0.5, Retraction(), kernels="triton")
    return [y.detach(), *torch.autograd.grad(y.square().sum() + y.sum(), inputs)]


if __name__ == "__main__":
    number = check("triton", WAYS)
    check_triton_alone()
    print(f"{number} checked")
