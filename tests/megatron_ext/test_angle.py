"""C, S and their slopes against 40-digit arithmetic."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

from megatron_ext.angle import Angle, angle_of, free_angle, slope_in_scale

POWERS = [0.1, 0.5, 1.0, 2.0, 3.5, math.inf]
SCALES = [0.3, 1.0, 1.7]
# Far below, just around and above the series' limit 1e-2 of q / p^2 and of theta^2, and beyond several turns.
BETAS = [1e-12, 1e-6, 1e-3, 9.9e-3, 0.0101, 0.03, 0.09999, 0.10001, 0.2, 0.35, 1.0, 3.0, 7.0, 40.0]


def exact(beta: float, power: float, scale: float, max_angle: float | None) -> dict[str, mpmath.mpf]:
    def functions(q: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
        b = mpmath.sqrt(q)
        phi = b if math.isinf(power) else power * mpmath.atan(b / power)
        theta = scale * phi if max_angle is None else min(scale * phi, mpmath.mpf(max_angle))
        return mpmath.cos(theta), mpmath.sin(theta) / b

    with mpmath.workdps(60):
        q = mpmath.mpf(beta) ** 2
        step = q * mpmath.mpf(10) ** -20
        low, high = functions(q - step), functions(q + step)
        cosine, sine = functions(q)
        return {
            "cosine": cosine,
            "sine": sine,
            "cosine_slope": (high[0] - low[0]) / (2 * step),
            "sine_slope": (high[1] - low[1]) / (2 * step),
        }


def squared(betas: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(betas, dtype=torch.float64).square()[:, None].to(dtype)


@pytest.mark.parametrize("max_angle", [None, math.pi / 2, 0.05])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("power", POWERS)
def test_the_functions_and_their_slopes_are_exact_at_every_size(
    power: float, scale: float, max_angle: float | None
) -> None:
    angle = angle_of(squared(BETAS), power, scale, max_angle)
    for row, beta in enumerate(BETAS):
        for name, expected in exact(beta, power, scale, max_angle).items():
            actual = getattr(angle, name)[row].item()
            # Absolute where the function passes zero: it is of order 1, its slope of order 1 / (1 + q).
            assert abs(actual - float(expected)) < 1e-12 * max(abs(float(expected)), 1 / (1 + beta**2)), (name, beta)


@pytest.mark.parametrize("power", POWERS)
def test_fp32_is_as_exact_as_its_storage(power: float) -> None:
    angle = angle_of(squared(BETAS, torch.float32), power, 1.0, None)
    expected = angle_of(squared(BETAS, torch.float32).double(), power, 1.0, None)
    small = torch.tensor([beta <= 7 for beta in BETAS])
    for name, tolerance in {"cosine": 1e-6, "sine": 1e-6, "cosine_slope": 1e-6, "sine_slope": 1e-4}.items():
        error = (getattr(angle, name).double() - getattr(expected, name)).abs()
        assert (error / getattr(expected, name).abs().clamp_min(1))[small].max() < tolerance, name


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_closed_forms_equal_the_general_route(power: float) -> None:
    """A scale that is a tensor takes the general route."""
    q = squared([0.0, *BETAS, 1e4])
    general = angle_of(q, power, torch.ones(1, dtype=torch.float64), None)
    for name, value in angle_of(q, power, 1.0, None)._asdict().items():
        torch.testing.assert_close(value, getattr(general, name), rtol=1e-13, atol=1e-14, msg=name)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("power", POWERS)
def test_at_zero_they_are_the_limits(power: float, scale: float) -> None:
    """C = 1, S = s, and the definition's series: S' = -s (s^2 / 6 + 1 / (3 p^2)), C' = -s^2 / 2."""
    angle = angle_of(torch.zeros(1, 1, dtype=torch.float64), power, scale, None)
    sine_slope = -scale * (scale**2 / 6 + 1 / (3 * power**2))
    torch.testing.assert_close(
        torch.cat(angle).flatten(), torch.tensor([1.0, scale, -(scale**2) / 2, sine_slope], dtype=torch.float64)
    )


@pytest.mark.parametrize("power", POWERS)
def test_the_free_angle_and_its_slope_in_the_scale(power: float) -> None:
    beta = torch.tensor(BETAS, dtype=torch.float64)[:, None]
    phi = beta if math.isinf(power) else power * torch.atan(beta / power)
    torch.testing.assert_close(free_angle(beta.square(), power, 1.7), 1.7 * phi, rtol=1e-12, atol=0)
    free = slope_in_scale(beta.square(), power, 1.7, None)
    torch.testing.assert_close(free, phi / beta, rtol=1e-12, atol=0)
    clamped = slope_in_scale(beta.square(), power, 1.7, 0.1)
    torch.testing.assert_close(clamped, torch.where(1.7 * phi > 0.1, 0.0, phi / beta), rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_angle", [None, 0.5])
def test_one_angle_and_no_slope_beyond_the_clamp(max_angle: float | None) -> None:
    angle: Angle = angle_of(squared([0.6, 3.0]), math.inf, 1.0, max_angle)
    assert (angle.cosine_slope == 0).all() == (max_angle is not None)
    if max_angle is not None:
        torch.testing.assert_close(angle.cosine, torch.full_like(angle.cosine, math.cos(max_angle)))
