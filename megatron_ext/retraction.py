"""Steps along the sphere: pure functions of one token's state and update, on any device.

A state x of norm r and a sublayer's output u give a new state of the same norm:

    v = u - (<x, u> / r^2) x            the part of u tangent to the sphere at x
    beta = alpha |v| / r                the normalised step
    theta = min(s phi(beta), clamp)     the angle of the step; s is the angle scale
    y = cos(theta) x + alpha (sin(theta) / beta) v

The retraction is the function phi(beta) = p arctan(beta / p): p = 1 is the metric projection, p = 2 Cayley's map, and
p = inf, where phi(beta) = beta, the exponential map. Sources: GeoNorm, arXiv 2601.22095 (the exponential map); Sphere
Retraction Normalizations, arXiv 2608.02668 (the family). The factors of x and v are smooth functions of q = beta^2, so
nothing is divided by |v|, and u = 0 is an ordinary point.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.kernels import EAGER, Branch, Choice, Kernels, Turn, kernels_of
from megatron_ext.kernels.eager import compute_dtype, dot, inverse_of
from megatron_ext.kernels.step import Retraction

StepSizeDecay = Callable[[int, int], float]

__all__ = [
    "LARGEST_SAFE_ANGLE",
    "SMALLEST_SAFE_BOUND",
    "STEP_SIZE_DECAYS",
    "Retraction",
    "project_to_sphere",
    "retract",
    "tangent",
]

STEP_SIZE_DECAYS: dict[str, StepSizeDecay] = {
    "harmonic": lambda index, count: 1.0 / index,
    "sqrt": lambda index, count: index**-0.5,
    # The papers' (count - index) / count would freeze the last step.
    "linear": lambda index, count: (count - index + 1) / count,
    "none": lambda index, count: 1.0,
}
"""Factor of the step size at a 1-based index out of `count` (GeoNorm, arXiv 2601.22095)."""

LARGEST_SAFE_ANGLE = 2.9
"""Below this angle in radians the update can be rebuilt from the output; near pi the output no longer shows it."""

SMALLEST_SAFE_BOUND = 0.1
"""A bound on the angle in radians must be at least this: at a bound the gradient needs the update's direction, which a
bf16 output that differs from its input by little more than rounding no longer shows."""


def tangent(state: Tensor, update: Tensor) -> Tensor:
    """The part of `update` orthogonal to `state`, row by row: u - (<x, u> / |x|^2) x.

    Args:
        state: [..., hidden], any floating type. A row of zeros gives a row of zeros.
        update: same shape.

    Returns:
        [..., hidden] in fp32 (fp64 for fp64 states).
    """
    dtype = compute_dtype(state)
    x, u = state.to(dtype), update.to(dtype)
    inverse = inverse_of(dot(x, x))
    return torch.where(inverse > 0, u - dot(x, u) * inverse * x, 0.0)


def project_to_sphere(state: Tensor, radius: float | Tensor) -> Tensor:
    """Scale every row of `state` [..., hidden] to norm `radius`; same shape and type. A row of zeros stays zero.

    `radius` is a number, or a tensor that spreads over the rows' [..., 1]; it gets a gradient. Of the hidden width only
    the result is kept for the backward pass.
    """
    result: Tensor = _Project.apply(state, radius)  # type: ignore[no-untyped-call]
    return result


class _Project(torch.autograd.Function):
    """y = radius x / |x|: dx = radius / |x| (g - <g, e> e), dradius = <g, e>, with the direction e = y / radius."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, radius: float | Tensor) -> Tensor:
        x = state.to(compute_dtype(state))
        # A row of zeros has no direction: its scale, and with it its gradient, is zero.
        scale = radius * inverse_of(dot(x, x)).sqrt()
        projected = (x * scale).to(state.dtype)
        ctx.save_for_backward(projected, scale, radius if isinstance(radius, Tensor) else None)
        ctx.radius = None if isinstance(radius, Tensor) else radius
        return projected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        projected, scale, radius = ctx.saved_tensors
        length = torch.full_like(scale, ctx.radius) if radius is None else radius.to(scale.dtype)
        g = grad.to(scale.dtype)
        direction = projected.to(scale.dtype) * torch.where(length > 0, 1 / length, 0.0)
        radial = dot(g, direction)
        grad_state = (scale * (g - radial * direction)).to(projected.dtype)
        return grad_state, radial.sum_to_size(radius.shape).to(radius.dtype) if ctx.needs_input_grad[1] else None


def retract(
    state: Tensor,
    update: Tensor,
    step_size: float | Tensor,
    retraction: Retraction,
    angle_scale: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
    dropout: float = 0.0,
    kernels: Choice = "eager",
) -> Tensor:
    """Move `state` along the sphere by `step_size` times the tangent part of `update` (the module's formula).

    Calculated in fp32 whatever the storage type, in fp64 for fp64 states, forward and backward; the backward pass is
    the exact closed form, also at update = 0, where the result is `state` itself, bit for bit.

    Args:
        state: [..., hidden]; its rows' norms are kept. A row of zeros gives zeros and zero gradients; in fp32 a row
            of norm below 1e-19 counts as one, and norms above 1e19, whose squares overflow, are not kept.
        update: same shape, possibly of another floating type.
        step_size: alpha, dimensionless, > 0; a tensor [] or [1] gets a gradient.
        retraction: which member of the family, its clamp, and what the backward pass keeps.
        angle_scale: s, dimensionless, > 0; a tensor [] or [1] gets a gradient.
        bias: [hidden], added to `update` before anything else; gets a gradient.
        kept: bool, shape of `update`: then dropout sets the other elements to zero and scales by 1 / (1 - dropout).
        dropout: share of elements that `kept` was drawn to leave out.
        kernels: which implementation, see :mod:`megatron_ext.kernels`.

    Returns:
        The new state, shape and type of `state`.

    Raises:
        ValueError: `save` is "output" with a step size or scale that needs a gradient, or these kernels cannot run.
    """
    learned = any(isinstance(number, Tensor) and number.requires_grad for number in (step_size, angle_scale))
    if learned and retraction.save == "output":
        raise ValueError("save='output' gives no usable gradient to a learned step size or angle scale; use 'update'")
    how = _How(retraction, dropout, kernels)
    result: Tensor = _Retract.apply(state, update, bias, kept, step_size, angle_scale, how)  # type: ignore[no-untyped-call]
    return result


class _Retract(torch.autograd.Function):
    """The step with its closed-form backward pass, by whatever implementation was chosen."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        output: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        step_size: float | Tensor,
        angle_scale: float | Tensor,
        how: "_How",
    ) -> Tensor:
        ctx.kernels = kernels_of(how.kernels, state)
        dtype = compute_dtype(state)
        ctx.turn = Turn(_number(step_size, dtype), _number(angle_scale, dtype), how.retraction)
        rows = _rows_for(ctx.kernels)
        branch = Branch(rows(output), bias, None if kept is None else rows(kept), how.dropout)
        step = ctx.kernels.step(rows(state), branch, ctx.turn)
        new_state: Tensor = _in_shape(step.state, state.shape)
        known = output if how.retraction.save == "update" else new_state
        ctx.save_for_backward(state, known, bias, kept, *step[1:])
        ctx.how, ctx.output_dtype = how, output.dtype
        return new_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        state, known, bias, kept, *numbers = ctx.saved_tensors
        rows = _rows_for(ctx.kernels)
        known = Branch(rows(known))
        mask = None if kept is None else rows(kept)
        if ctx.how.retraction.save == "update":
            known = Branch(known.output, bias, mask, ctx.how.dropout)
        gradients = ctx.kernels.step_back(
            rows(grad), rows(state), known, tuple(numbers), ctx.turn, tuple(ctx.needs_input_grad[4:6])
        )
        of_output = gradients.update.to(ctx.output_dtype)
        if mask is not None:
            of_output = torch.where(mask, of_output * (1 / (1 - ctx.how.dropout)), 0.0)
        of_bias = _rows(of_output).sum(0, dtype=numbers[0].dtype).to(bias.dtype) if ctx.needs_input_grad[2] else None
        return (
            *(_in_shape(gradients.state, state.shape), _in_shape(of_output, state.shape), of_bias, None),
            *(None if sum_ is None else sum_.view(1) for sum_ in gradients[2:]),
            None,
        )


class _How(NamedTuple):
    retraction: Retraction
    dropout: float
    kernels: Choice


def _rows_for(kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """How to hand over [..., hidden]: the eager kernels take it as it is.

    The new state then is no view, which Megatron-core would replace, at the cost of a break in a compiled layer.
    """
    return (lambda tensor: tensor) if kernels is EAGER else _rows


def _in_shape(tensor: Tensor, shape: torch.Size) -> Tensor:
    return tensor if tensor.shape == shape else tensor.view(shape)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _number(value: float | Tensor, dtype: torch.dtype) -> Any:
    """A factor for fp32 or fp64 arithmetic: a plain number, or a detached tensor of one element."""
    return value.detach().to(dtype).view(1) if isinstance(value, Tensor) else value
