import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.retraction import STEP_SIZE_DECAYS, exponential_step, project_to_sphere, tangent

ALPHAS = [1 / 48, 1.0, 4.0]
CLAMPS = [None, math.pi / 2, 0.3, 0.01]
HIDDEN = 48


def plain_step(x: Tensor, u: Tensor, alpha: float, max_angle: float | None) -> Tensor:
    """The formula as it is written in the paper, for autograd to differentiate."""
    r = x.norm(dim=-1, keepdim=True)
    v = alpha * (u - (x * u).sum(-1, keepdim=True) / r**2 * x)
    length = v.norm(dim=-1, keepdim=True)
    theta = length / r
    if max_angle is not None:
        theta = theta.clamp_max(max_angle)
    return theta.cos() * x + r * theta.sin() * v / length


def draw(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def states(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return project_to_sphere(draw(rows, HIDDEN, seed=seed), math.sqrt(HIDDEN)).to(dtype)


def value_and_gradients(
    step: Callable[..., Tensor], x: Tensor, u: Tensor, g: Tensor, *arguments: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    x, u = x.clone().requires_grad_(), u.clone().requires_grad_()
    y = step(x, u, *arguments)
    y.backward(g.to(y.dtype))
    return y.detach(), x.grad, u.grad


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("max_angle", CLAMPS)
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 3.0])
def test_equals_autograd_of_the_plain_formula_in_fp64(alpha: float, max_angle: float | None, scale: float) -> None:
    x, u, g = states(7), draw(7, HIDDEN, seed=1, scale=scale), draw(7, HIDDEN, seed=2)
    expected = value_and_gradients(plain_step, x, u, g, alpha, max_angle)
    actual = value_and_gradients(exponential_step, x, u, g, alpha, max_angle)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-12


def test_the_clamp_of_these_tests_is_active_for_some_rows_and_inactive_for_others() -> None:
    x, u = states(64), draw(64, HIDDEN, seed=1) * torch.linspace(0.1, 3, 64, dtype=torch.float64)[:, None]
    angle = tangent(x, u).norm(dim=-1) / x.norm(dim=-1)
    assert 10 < (angle > math.pi / 2).sum() < 54
    y = exponential_step(x, u, 1.0, math.pi / 2)
    turned = torch.acos((x * y).sum(-1) / x.square().sum(-1))
    torch.testing.assert_close(turned, angle.clamp_max(math.pi / 2))
    torch.testing.assert_close(y, plain_step(x, u, 1.0, math.pi / 2))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("max_angle", CLAMPS)
def test_gradcheck(alpha: float, max_angle: float | None) -> None:
    x, u = states(3)[:, :9].contiguous(), draw(3, 9, seed=1)
    u[0] *= 1e-3  # inside the series
    arguments = (x.requires_grad_(), u.requires_grad_(), alpha, max_angle)
    assert torch.autograd.gradcheck(exponential_step, arguments)


@pytest.mark.parametrize("beta", [1e-9, 0.0316, 0.03163, 0.05, math.pi, 2 * math.pi, 7.0])
def test_accurate_at_the_edge_of_the_series_and_where_the_sine_vanishes(beta: float) -> None:
    """The series ends at beta = sqrt(1e-3) = 0.031623."""
    x = states(5)
    u = project_to_sphere(tangent(x, draw(5, HIDDEN, seed=1)), beta * math.sqrt(HIDDEN)) + 0.5 * x
    g = draw(5, HIDDEN, seed=2)
    expected = value_and_gradients(plain_step, x, u, g, 1.0, None)
    for a, e in zip(value_and_gradients(exponential_step, x, u, g, 1.0, None), expected, strict=True):
        assert relative_error(a, e) < 1e-11


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("beta", [1e-5, 1e-2, 1.0, 1.9, 2.9, math.pi, 2 * math.pi])
def test_storage_types_against_fp64(dtype: torch.dtype, tolerance: float, alpha: float, beta: float) -> None:
    """fp32 inside: the error is one rounding of the inputs and outputs."""
    x = states(16, dtype=dtype)
    u = project_to_sphere(tangent(x.double(), draw(16, HIDDEN, seed=1)), beta / alpha * math.sqrt(HIDDEN)).to(dtype)
    g = draw(16, HIDDEN, seed=2, dtype=dtype)
    expected = value_and_gradients(exponential_step, x.double(), u.double(), g.double(), alpha, None)
    actual = value_and_gradients(exponential_step, x, u, g, alpha, None)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) < tolerance


def test_an_update_of_another_type_gets_a_gradient_of_its_own_type() -> None:
    x, u = states(4, dtype=torch.float32), draw(4, HIDDEN, seed=1, dtype=torch.bfloat16)
    y, dx, du = value_and_gradients(exponential_step, x, u, draw(4, HIDDEN, seed=2), 1.0, None)
    assert (y.dtype, dx.dtype, du.dtype) == (torch.float32, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_angle", CLAMPS)
def test_a_zero_update_gives_the_state_itself_and_the_linear_gradients(
    dtype: torch.dtype, max_angle: float | None
) -> None:
    x, u, g = states(5, dtype=dtype), torch.zeros(5, HIDDEN, dtype=dtype), draw(5, HIDDEN, seed=2, dtype=dtype)
    y, dx, du = value_and_gradients(exponential_step, x, u, g, 0.25, max_angle)
    assert torch.equal(y, x)
    assert torch.equal(dx, g)
    expected = 0.25 * tangent(x, g)  # to first order y = x + alpha * tangent(u)
    assert relative_error(du, expected) < {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_angle", CLAMPS)
def test_a_row_of_zeros_stays_zero_and_leaves_the_other_rows_alone(dtype: torch.dtype, max_angle: float | None) -> None:
    x, u, g = states(3, dtype=dtype), draw(3, HIDDEN, seed=1, dtype=dtype), draw(3, HIDDEN, seed=2, dtype=dtype)
    alone = value_and_gradients(exponential_step, x[1:], u[1:], g[1:], 1.0, max_angle)
    x[0] = 0
    together = value_and_gradients(exponential_step, x, u, g, 1.0, max_angle)
    for with_zeros, without in zip(together, alone, strict=True):
        assert torch.equal(with_zeros[0], torch.zeros_like(with_zeros[0]))
        assert torch.equal(with_zeros[1:], without)


@pytest.mark.parametrize(("dtype", "drift"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
def test_the_norm_is_kept_over_96_steps(dtype: torch.dtype, drift: float) -> None:
    """At a model's width: the rounding of the stored elements averages out as 1 / sqrt(hidden)."""
    x = project_to_sphere(draw(32, 1024), 32.0).to(dtype)
    start = x.double().norm(dim=-1)
    for step in range(96):
        x = exponential_step(x, draw(32, 1024, seed=step, dtype=dtype), 1 / (1 + step // 2), None)
    assert ((x.double().norm(dim=-1) / start) - 1).abs().mean() < drift


def test_projection_gives_the_radius_and_keeps_the_direction() -> None:
    x = draw(6, HIDDEN, dtype=torch.float32, scale=1e-3)
    y = project_to_sphere(x, 5.0)
    torch.testing.assert_close(y.norm(dim=-1), torch.full((6,), 5.0))
    torch.testing.assert_close(y / 5, x / x.norm(dim=-1, keepdim=True))
    assert project_to_sphere(x.bfloat16(), 5.0).dtype == torch.bfloat16


def test_projection_of_a_row_of_zeros_is_zero_with_a_zero_gradient() -> None:
    x = draw(2, HIDDEN, dtype=torch.float32)
    x[0] = 0
    y = project_to_sphere(x.requires_grad_(), 5.0)
    y.sum().backward()
    assert torch.equal(y[0], torch.zeros(HIDDEN))
    assert torch.equal(x.grad[0], torch.zeros(HIDDEN))
    assert x.grad[1].abs().max() > 0


def test_projection_gradcheck() -> None:
    assert torch.autograd.gradcheck(project_to_sphere, (draw(3, 7).requires_grad_(), 2.0))


def test_tangent_is_orthogonal_and_leaves_tangent_updates_alone() -> None:
    x, u = states(4), draw(4, HIDDEN, seed=1)
    v = tangent(x, u)
    assert ((x * v).sum(-1)).abs().max() < 1e-12
    torch.testing.assert_close(tangent(x, v), v)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("harmonic", [1, 1 / 2, 1 / 3, 1 / 4]),
        ("sqrt", [1, 2**-0.5, 3**-0.5, 1 / 2]),
        ("linear", [1, 3 / 4, 2 / 4, 1 / 4]),
        ("none", [1, 1, 1, 1]),
    ],
)
def test_decays(name: str, expected: Any) -> None:
    assert [STEP_SIZE_DECAYS[name](k, 4) for k in (1, 2, 3, 4)] == pytest.approx(expected)
