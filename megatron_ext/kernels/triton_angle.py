"""The angle of a step inside Triton kernels: :mod:`megatron_ext.angle` for one number, in fp32.

Triton's interpreter has no inverse tangent, so it is computed here, to 2e-7.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN201, N803

import triton
import triton.language as tl

_NEAR_ZERO = tl.constexpr(1e-2)


@triton.jit
def _arctan(z):
    """Of z >= 0: an argument above tan(pi / 8) is turned back by pi / 4 or pi / 2 (Cephes, atanf)."""
    far, middle = z > 2.414213562373095, z > 0.4142135623730950
    turned = tl.where(far, -1.0 / tl.where(far, z, 1.0), tl.where(middle, (z - 1.0) / (z + 1.0), z))
    w = turned * turned
    series = ((8.05374449538e-2 * w - 1.38776856032e-1) * w + 1.99777106478e-1) * w - 3.33329491539e-1
    start = tl.where(far, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return start + (turned + turned * w * series)


@triton.jit
def _arctan_ratio(w):
    """arctan(z) / z and its slope as functions of w = z^2; the series is the sum of (-w)^n / (2 n + 1)."""
    near = w < _NEAR_ZERO
    safe = tl.where(near, 1.0, w)
    z = tl.sqrt(safe)
    ratio = _arctan(z) / z
    slope = (1.0 / (1.0 + safe) - ratio) / (2.0 * safe)
    series = 1.0 + w * (-1 / 3 + w * (1 / 5 + w * (-1 / 7 + w / 9)))
    series_slope = -1 / 3 + w * (2 / 5 + w * (-3 / 7 + w * 4 / 9))
    return tl.where(near, series, ratio), tl.where(near, series_slope, slope)


@triton.jit
def _sinc(m):
    """sin(t) / t and its slope as functions of m = t^2; the series is the sum of (-m)^n / (2 n + 1)!."""
    near = m < _NEAR_ZERO
    safe = tl.where(near, 1.0, m)
    t = tl.sqrt(safe)
    ratio = tl.sin(t) / t
    slope = (tl.cos(t) - ratio) / (2.0 * safe)
    series = 1.0 + m * (-1 / 6 + m * (1 / 120 - m / 5040))
    series_slope = -1 / 6 + m * (1 / 60 - m / 1680)
    return tl.where(near, series, ratio), tl.where(near, series_slope, slope)


@triton.jit
def angle_of(q, scale, POWER: tl.constexpr, FREE: tl.constexpr, BOUND, COS_BOUND, SIN_BOUND):
    """C, S, dC/dq, dS/dq and phi(beta) / beta, the last 0 where the angle is at its bound.

    POWER is p, 0 for the exponential map. FREE: there is no bound.
    """
    if POWER == 0:
        ratio, ratio_slope, growth = 1.0, 0.0, 1.0
    else:
        w = q / (POWER * POWER)
        ratio, ratio_slope = _arctan_ratio(w)
        ratio_slope = ratio_slope / (POWER * POWER)
        growth = 1.0 / (1.0 + w)
    squared = scale * scale * ratio * ratio * q
    theta = tl.sqrt(squared)
    sinc, sinc_slope = _sinc(squared)
    stretch = scale * scale * ratio * growth
    cosine, sine = tl.cos(theta), scale * ratio * sinc
    cosine_slope = -sinc * stretch / 2
    sine_slope = scale * (ratio_slope * sinc + ratio * sinc_slope * stretch)
    slope = ratio + 0.0 * q
    if not FREE:
        over = theta > BOUND
        safe = tl.where(over, q, 1.0)
        bounded = SIN_BOUND / tl.sqrt(safe)
        cosine, sine = tl.where(over, COS_BOUND, cosine), tl.where(over, bounded, sine)
        cosine_slope = tl.where(over, 0.0, cosine_slope)
        sine_slope = tl.where(over, -bounded / (2.0 * safe), sine_slope)
        slope = tl.where(over, 0.0, slope)
    return cosine, sine, cosine_slope, sine_slope, slope
