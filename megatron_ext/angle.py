"""The angle of a step along the sphere as smooth functions of q = beta^2, with their slopes.

    theta = min(s p arctan(beta / p), clamp),    C = cos(theta),    S = sin(theta) / beta

Neither C nor S is computed by dividing by a small beta: with A = p arctan(beta / p) / beta, which is a smooth
function of w = q / p^2, and m = theta^2 = s^2 q A^2, S = s A sin(theta) / theta is a product of smooth functions.

Source: Sphere Retraction Normalizations, arXiv 2608.02668; p = inf is GeoNorm, arXiv 2601.22095.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Below this argument the slopes lose digits by cancellation, and the series are exact in fp64.
_SERIES_BELOW = 1e-2


class Angle(NamedTuple):
    """Functions of q, each [..., 1].

    Attributes:
        cosine: C.
        sine: S.
        cosine_slope: dC/dq.
        sine_slope: dS/dq.
    """

    cosine: Tensor
    sine: Tensor
    cosine_slope: Tensor
    sine_slope: Tensor


def angle_of(q: Tensor, power: float, scale: float | Tensor, max_angle: float | None) -> Angle:
    """C, S and their slopes for q [..., 1] in fp32 or fp64.

    Args:
        q: beta^2 >= 0.
        power: p > 0; inf for the exponential map.
        scale: s > 0.
        max_angle: the clamp in radians, None for none.
    """
    closed_form = _CLOSED_FORMS.get(power)
    if closed_form is not None and max_angle is None and isinstance(scale, float) and scale == 1.0:
        return closed_form(q)
    return _general(q, power, scale, max_angle)


def free_angle(q: Tensor, power: float, scale: float | Tensor) -> Tensor:
    """s phi(beta) in radians, [..., 1]: the angle before the clamp."""
    angle: Tensor = scale * _turn_ratio(q, power)[0] * q.sqrt()
    return angle


def slope_in_scale(q: Tensor, power: float, scale: float | Tensor, max_angle: float | None) -> Tensor:
    """(dtheta/ds) / beta, [..., 1]: phi(beta) / beta, and 0 where the angle is clamped."""
    ratio = torch.as_tensor(_turn_ratio(q, power)[0], dtype=q.dtype, device=q.device).expand_as(q)
    return ratio if max_angle is None else ratio.masked_fill(free_angle(q, power, scale) > max_angle, 0.0)


def _general(q: Tensor, power: float, scale: float | Tensor, max_angle: float | None) -> Angle:
    ratio, ratio_slope, growth = _turn_ratio(q, power)
    squared_angle = scale**2 * ratio * ratio * q
    theta = squared_angle.sqrt()
    sinc, sinc_slope = _sinc(squared_angle)
    # d(theta^2)/dq = theta f / beta with f = dtheta/dbeta = s growth.
    stretch = scale**2 * ratio * growth
    free = Angle(
        cosine=theta.cos(),
        sine=scale * ratio * sinc,
        cosine_slope=-sinc * stretch / 2,
        sine_slope=scale * (ratio_slope * sinc + ratio * sinc_slope * stretch),
    )
    return free if max_angle is None else _clamped(free, q, theta, max_angle)


def _turn_ratio(q: Tensor, power: float) -> tuple[Any, Any, Any]:
    """phi(beta) / beta, its slope in q, and dphi/dbeta; plain numbers for the exponential map."""
    if power == math.inf:
        return 1.0, 0.0, 1.0
    w = q / power**2
    ratio, slope = _arctan_ratio(w)
    return ratio, slope / power**2, 1 / (1 + w)


def _clamped(free: Angle, q: Tensor, theta: Tensor, max_angle: float) -> Angle:
    """The angle no longer grows beyond `max_angle`: there S falls with beta alone."""
    over = theta > max_angle
    safe_q = q.masked_fill(~over, 1.0)
    sine = math.sin(max_angle) * safe_q.rsqrt()
    return Angle(
        cosine=free.cosine.masked_fill(over, math.cos(max_angle)),
        sine=torch.where(over, sine, free.sine),
        cosine_slope=free.cosine_slope.masked_fill(over, 0.0),
        sine_slope=torch.where(over, -sine / (2 * safe_q), free.sine_slope),
    )


def _arctan_ratio(w: Tensor) -> tuple[Tensor, Tensor]:
    """arctan(z) / z and its slope as functions of w = z^2."""
    near_zero = w < _SERIES_BELOW
    safe = w.masked_fill(near_zero, 1.0)
    z = safe.sqrt()
    ratio = z.atan() / z
    slope = (1 / (1 + safe) - ratio) / (2 * safe)
    # sum of (-w)^n / (2 n + 1)
    coefficients = [(-1) ** n / (2 * n + 1) for n in range(9)]
    return _near_zero(near_zero, w, coefficients, ratio, slope)


def _sinc(m: Tensor) -> tuple[Tensor, Tensor]:
    """sin(t) / t and its slope as functions of m = t^2."""
    near_zero = m < _SERIES_BELOW
    safe = m.masked_fill(near_zero, 1.0)
    t = safe.sqrt()
    sinc = t.sin() / t
    slope = (t.cos() - sinc) / (2 * safe)
    # sum of (-m)^n / (2 n + 1)!
    coefficients = [(-1) ** n / math.factorial(2 * n + 1) for n in range(7)]
    return _near_zero(near_zero, m, coefficients, sinc, slope)


def _near_zero(
    near_zero: Tensor, x: Tensor, coefficients: list[float], value: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """`value` and `slope`, replaced by a polynomial and its derivative where `near_zero`; fp32 shows half the terms."""
    if x.dtype != torch.float64:
        coefficients = coefficients[: len(coefficients) // 2 + 1]
    derivative = torch.full_like(x, coefficients[-1])
    polynomial = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        derivative = torch.addcmul(polynomial, derivative, x)
        polynomial = polynomial * x + coefficient
    return torch.where(near_zero, polynomial, value), torch.where(near_zero, derivative, slope)


def _projection(q: Tensor) -> Angle:
    """p = 1 without trigonometry: C = S = 1 / sqrt(1 + q)."""
    value = (1 + q).rsqrt()
    slope = -(value**3) / 2
    return Angle(value, value, slope, slope)


def _cayley(q: Tensor) -> Angle:
    """p = 2 without trigonometry: C = (1 - q/4) / (1 + q/4), S = 1 / (1 + q/4)."""
    value = 1 / (1 + q / 4)
    slope = -value.square()
    return Angle((1 - q / 4) * value, value, slope / 2, slope / 4)


_CLOSED_FORMS = {1.0: _projection, 2.0: _cayley}
