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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.angle import Angle, angle_of, slope_in_scale

StepSizeDecay = Callable[[int, int], float]

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


@dataclass(frozen=True)
class Retraction:
    """Which step along the sphere.

    Attributes:
        power: p > 0 of the family; inf is the exponential map.
        max_angle: largest angle of a step in radians; None leaves it free (the exponential map wraps round beyond pi).
        save: what the backward pass keeps beside the state: the ``update``, or the ``output``, which the next sublayer
            keeps anyway. ``output`` needs angles below :data:`LARGEST_SAFE_ANGLE`, bounded by no less than
            :data:`SMALLEST_SAFE_BOUND`, and a constant step size and scale.
    """

    power: float = math.inf
    max_angle: float | None = None
    save: Literal["update", "output"] = "update"


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type to calculate in: fp64 for fp64 storage, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def tangent(state: Tensor, update: Tensor) -> Tensor:
    """The part of `update` orthogonal to `state`, row by row: u - (<x, u> / |x|^2) x.

    Args:
        state: [..., hidden], any floating type. A row of zeros gives a row of zeros.
        update: same shape.

    Returns:
        [..., hidden] in fp32 (fp64 for fp64 states).
    """
    dtype = compute_dtype(state)
    parts = _decompose(state.to(dtype), update.to(dtype))
    return torch.where(parts.inverse_squared_norm > 0, parts.tangent, 0.0)


def project_to_sphere(state: Tensor, radius: float | Tensor) -> Tensor:
    """Scale every row of `state` [..., hidden] to norm `radius`; same shape and type. A row of zeros stays zero."""
    x = state.to(compute_dtype(state))
    squared_norm = x.square().sum(-1, keepdim=True)
    safe = squared_norm.clamp_min(torch.finfo(x.dtype).tiny)
    # A row of zeros has no direction: its scale, and with it its gradient, is zero.
    scale = torch.where(squared_norm > 0, radius * safe.rsqrt(), 0.0)
    return (x * scale).to(state.dtype)


def retract(
    state: Tensor,
    update: Tensor,
    step_size: float | Tensor,
    retraction: Retraction,
    angle_scale: float | Tensor = 1.0,
) -> Tensor:
    """Move `state` along the sphere by `step_size` times the tangent part of `update` (the module's formula).

    Calculated in fp32 whatever the storage type, in fp64 for fp64 states, forward and backward; the backward pass is
    the exact closed form, also at update = 0, where the result is `state` itself, bit for bit.

    Args:
        state: [..., hidden]; its rows' norms are kept. A row of zeros gives zeros and zero gradients.
        update: same shape, possibly of another floating type.
        step_size: alpha, dimensionless, > 0; a tensor of one element gets a gradient.
        retraction: which member of the family, its clamp, and what the backward pass keeps.
        angle_scale: s, dimensionless, > 0; a tensor of one element gets a gradient.

    Returns:
        The new state, shape and type of `state`.

    Raises:
        ValueError: `save` is "output" with a step size or scale that needs a gradient.
    """
    learned = any(isinstance(number, Tensor) and number.requires_grad for number in (step_size, angle_scale))
    if learned and retraction.save == "output":
        raise ValueError("save='output' gives no usable gradient to a learned step size or angle scale; use 'update'")
    result: Tensor = _Retract.apply(state, update, step_size, angle_scale, retraction)  # type: ignore[no-untyped-call]
    return result


class _Decomposition(NamedTuple):
    """Row-wise quantities of a state and an update; scalars are [..., 1]."""

    inverse_squared_norm: Tensor  # 1 / r^2; 0 for a row of zeros
    inner: Tensor  # <x, u>
    tangent: Tensor  # v; u itself for a row of zeros


def _decompose(x: Tensor, u: Tensor) -> _Decomposition:
    squared_norm = x.square().sum(-1, keepdim=True)
    tiny = torch.finfo(x.dtype).tiny
    inverse = torch.where(squared_norm > tiny, 1 / squared_norm.clamp_min(tiny), 0.0)
    inner = _dot(x, u)
    return _Decomposition(inverse, inner, u - (inner * inverse) * x)


def _angle_of_live_rows(q: Tensor, retraction: Retraction, scale: float | Tensor, inverse: Tensor) -> Angle:
    """C, S and their slopes, with C = S = 0 in the rows of zeros: neither a value nor a gradient passes there."""
    angle = angle_of(q, retraction.power, scale, retraction.max_angle)
    live = (inverse > 0).to(q.dtype)
    return angle._replace(cosine=live * angle.cosine, sine=live * angle.sine)


class _Retract(torch.autograd.Function):
    """The step with its closed-form backward (derived in the comments of `backward`)."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        update: Tensor,
        step_size: float | Tensor,
        angle_scale: float | Tensor,
        retraction: Retraction,
    ) -> Tensor:
        dtype = compute_dtype(state)
        x = state.to(dtype)
        alpha, scale = _number(step_size, dtype), _number(angle_scale, dtype)
        inverse, inner, v = _decompose(x, update.to(dtype))
        q = alpha**2 * v.square().sum(-1, keepdim=True) * inverse
        angle = _angle_of_live_rows(q, retraction, scale, inverse)
        output: Tensor = (angle.cosine * x + (alpha * angle.sine) * v).to(state.dtype)
        ctx.save_for_backward(state, update if retraction.save == "update" else output, inverse, inner, q)
        ctx.alpha, ctx.scale, ctx.retraction = alpha, scale, retraction
        ctx.update_dtype = update.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        state, kept, inverse, inner, q = ctx.saved_tensors
        alpha, scale, retraction = ctx.alpha, ctx.scale, ctx.retraction
        x, g = state.to(q.dtype), grad.to(q.dtype)
        angle = _angle_of_live_rows(q, retraction, scale, inverse)
        if retraction.save == "update":
            u = kept.to(q.dtype)
            v = u - (inner * inverse) * x
        else:
            step = torch.where(inverse > 0, 1 / (alpha * angle.sine), 0.0)
            v = step * (kept.to(q.dtype) - angle.cosine * x)
            u = v + (inner * inverse) * x
        grad_x, grad_v = _dot(g, x), _dot(g, v)
        # h = dL/dq, through C and S; q depends on v and on r.
        h = angle.cosine_slope * grad_x + alpha * angle.sine_slope * grad_v
        # G = dL/dv; v depends on u and, through the projection, on x.
        grad_tangent = (alpha * angle.sine) * g + (2 * alpha**2 * h * inverse) * v
        along = _dot(x, grad_tangent) * inverse
        grad_update = grad_tangent - along * x
        grad_state = (
            angle.cosine * g
            + (2 * inner * inverse * along - 2 * q * h * inverse) * x
            - along * u
            - (inner * inverse) * grad_tangent
        )
        grad_alpha = grad_scale = None
        if ctx.needs_input_grad[2]:
            grad_alpha = (angle.sine * grad_v + 2 * q * h / alpha).sum().view(1)
        if ctx.needs_input_grad[3]:
            # dC/ds = -sin(theta) phi and dS/ds = cos(theta) phi / beta, where the angle still grows.
            slope = slope_in_scale(q, retraction.power, scale, retraction.max_angle)
            grad_scale = (slope * (alpha * angle.cosine * grad_v - q * angle.sine * grad_x)).sum().view(1)
        return grad_state.to(state.dtype), grad_update.to(ctx.update_dtype), grad_alpha, grad_scale, None


def _number(value: float | Tensor, dtype: torch.dtype) -> Any:
    """A factor for fp32 or fp64 arithmetic: a plain number, or a detached tensor of one element."""
    return value.detach().to(dtype) if isinstance(value, Tensor) else value


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
