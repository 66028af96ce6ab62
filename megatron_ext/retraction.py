"""Steps along the sphere: pure functions of one token's state and update, on any device.

A state x of norm r and a sublayer's output u give a new state of the same norm:

    v = u - (<x, u> / r^2) x            the part of u tangent to the sphere at x
    beta = alpha |v| / r                the normalised step
    theta = min(beta, max_angle)        the angle of the step
    y = cos(theta) x + alpha (sin(theta) / beta) v

Source: GeoNorm, arXiv 2601.22095 (the exponential map of the sphere). The sine and cosine terms are smooth functions of
q = beta^2, so nothing is divided by |v|, and u = 0 is an ordinary point.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Below this q the closed form of d(sin(beta)/beta)/dq loses digits by cancellation, and the series is exact in fp64.
_SERIES_BELOW = 1e-3

StepSizeDecay = Callable[[int, int], float]

STEP_SIZE_DECAYS: dict[str, StepSizeDecay] = {
    "harmonic": lambda index, count: 1.0 / index,
    "sqrt": lambda index, count: index**-0.5,
    # The paper's (count - index) / count would freeze the last step.
    "linear": lambda index, count: (count - index + 1) / count,
    "none": lambda index, count: 1.0,
}
"""Factor of the step size at a 1-based index out of `count` (GeoNorm, arXiv 2601.22095)."""


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
    x, u = state.to(dtype), update.to(dtype)
    parts = _decompose(x, u)
    return torch.where(parts.inverse_squared_norm > 0, parts.tangent, 0.0)


def project_to_sphere(state: Tensor, radius: float) -> Tensor:
    """Scale every row of `state` [..., hidden] to norm `radius`; same shape and type. A row of zeros stays zero."""
    x = state.to(compute_dtype(state))
    squared_norm = x.square().sum(-1, keepdim=True)
    safe = squared_norm.clamp_min(torch.finfo(x.dtype).tiny)
    # A row of zeros has no direction: its scale, and with it its gradient, is zero.
    scale = torch.where(squared_norm > 0, radius * safe.rsqrt(), 0.0)
    return (x * scale).to(state.dtype)


def exponential_step(state: Tensor, update: Tensor, step_size: float, max_angle: float | None = None) -> Tensor:
    """Move `state` along the sphere by `step_size` times the tangent part of `update` (the module's formula).

    Calculated in fp32 whatever the storage type, in fp64 for fp64 states, forward and backward; the backward pass is
    the exact closed form, also at update = 0, where the result is `state` itself, bit for bit.

    Args:
        state: [..., hidden]; its rows' norms are kept. A row of zeros gives zeros and zero gradients.
        update: same shape, possibly of another floating type.
        step_size: alpha, dimensionless, > 0.
        max_angle: largest angle of the step in radians; None leaves it free (it wraps round beyond pi).

    Returns:
        The new state, shape and type of `state`.
    """
    result: Tensor = _ExponentialStep.apply(state, update, step_size, max_angle)  # type: ignore[no-untyped-call]
    return result


class _Decomposition(NamedTuple):
    """Row-wise quantities of a state and an update; scalars are [..., 1]."""

    inverse_squared_norm: Tensor  # 1 / r^2; 0 for a row of zeros
    inner: Tensor  # <x, u>
    tangent: Tensor  # v; u itself for a row of zeros


class _Angle(NamedTuple):
    """Functions of q = beta^2, each [..., 1]."""

    cosine: Tensor  # C = cos(theta)
    sine: Tensor  # S = sin(theta) / beta
    cosine_slope: Tensor  # dC/dq
    sine_slope: Tensor  # dS/dq


def _decompose(x: Tensor, u: Tensor) -> _Decomposition:
    squared_norm = x.square().sum(-1, keepdim=True)
    tiny = torch.finfo(x.dtype).tiny
    inverse = torch.where(squared_norm > tiny, 1 / squared_norm.clamp_min(tiny), 0.0)
    inner = _dot(x, u)
    return _Decomposition(inverse, inner, u - (inner * inverse) * x)


def _angle(q: Tensor, max_angle: float | None) -> _Angle:
    # The series knows no clamp: it ends where the clamp begins.
    near_zero = q < (_SERIES_BELOW if max_angle is None else min(_SERIES_BELOW, max_angle**2))
    safe_q = torch.where(near_zero, 1.0, q)
    beta = safe_q.sqrt()
    theta = beta if max_angle is None else beta.clamp_max(max_angle)
    cosine, sine = theta.cos(), theta.sin()
    # dtheta/dbeta: the angle no longer grows where it is clamped.
    growth = torch.ones_like(beta) if max_angle is None else (beta <= max_angle).to(beta.dtype)
    series = _series(q)
    return _Angle(
        cosine=torch.where(near_zero, series.cosine, cosine),
        sine=torch.where(near_zero, series.sine, sine / beta),
        cosine_slope=torch.where(near_zero, series.cosine_slope, -growth * sine / (2 * beta)),
        sine_slope=torch.where(near_zero, series.sine_slope, (growth * beta * cosine - sine) / (2 * beta * safe_q)),
    )


def _series(q: Tensor) -> _Angle:
    """cos(sqrt q), sin(sqrt q)/sqrt q and their slopes to fp64 precision for q below the limit."""
    return _Angle(
        cosine=1 - q / 2 * (1 - q / 12 * (1 - q / 30 * (1 - q / 56))),
        sine=1 - q / 6 * (1 - q / 20 * (1 - q / 42 * (1 - q / 72))),
        cosine_slope=-(1 - q / 6 * (1 - q / 20 * (1 - q / 42))) / 2,
        sine_slope=-1 / 6 + q / 60 - q.square() / 1680 + q**3 / 90720,
    )


def _angle_of_live_rows(q: Tensor, max_angle: float | None, inverse: Tensor) -> _Angle:
    """As `_angle`, with C = S = 0 in the rows of zeros: neither a value nor a gradient passes there."""
    angle, live = _angle(q, max_angle), (inverse > 0).to(q.dtype)
    return angle._replace(cosine=live * angle.cosine, sine=live * angle.sine)


class _ExponentialStep(torch.autograd.Function):
    """The step with its closed-form backward (derived in the comments of `backward`)."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, update: Tensor, step_size: float, max_angle: float | None) -> Tensor:
        dtype = compute_dtype(state)
        x = state.to(dtype)
        inverse, inner, v = _decompose(x, update.to(dtype))
        q = step_size**2 * v.square().sum(-1, keepdim=True) * inverse
        angle = _angle_of_live_rows(q, max_angle, inverse)
        ctx.save_for_backward(state, update, inverse, inner, q)
        ctx.step_size, ctx.max_angle = step_size, max_angle
        return (angle.cosine * x + (step_size * angle.sine) * v).to(state.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        state, update, inverse, inner, q = ctx.saved_tensors
        alpha: float = ctx.step_size
        x, u, g = state.to(q.dtype), update.to(q.dtype), grad.to(q.dtype)
        v = u - (inner * inverse) * x
        angle = _angle_of_live_rows(q, ctx.max_angle, inverse)
        # h = dL/dq, through C and S; q depends on v and on r.
        h = angle.cosine_slope * _dot(g, x) + alpha * angle.sine_slope * _dot(g, v)
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
        return grad_state.to(state.dtype), grad_update.to(update.dtype), None, None


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
