import math
from typing import Any

import pytest
import torch

from megatron_ext import ResidualSettings
from megatron_ext.residual import ExponentialResidual, largest_angle, sphere_radius, step_size
from megatron_ext.retraction import exponential_step


@pytest.mark.parametrize(
    ("decay", "step_index", "expected"),
    [
        ("harmonic", "layer", [0.5, 0.5, 0.25, 0.25, 0.5 / 3, 0.5 / 3]),
        ("harmonic", "sublayer", [0.5 / k for k in range(1, 7)]),
        ("linear", "layer", [0.5, 0.5, 1 / 3, 1 / 3, 0.5 / 3, 0.5 / 3]),
        ("linear", "sublayer", [0.5 * k / 6 for k in (6, 5, 4, 3, 2, 1)]),
        ("sqrt", "sublayer", [0.5 * k**-0.5 for k in range(1, 7)]),
        ("none", "layer", [0.5] * 6),
    ],
)
def test_step_sizes_of_a_network_of_three_layers(decay: Any, step_index: Any, expected: Any) -> None:
    settings = ResidualSettings(alpha=0.5, decay=decay, step_index=step_index)
    sizes = [step_size(settings, layer, sublayer, 3) for layer in (1, 2, 3) for sublayer in (0, 1)]
    assert sizes == pytest.approx(expected)


def test_radius_and_clamp() -> None:
    assert sphere_radius(ResidualSettings(), 64) == 8.0
    assert sphere_radius(ResidualSettings(radius=2.5), 64) == 2.5
    assert largest_angle(ResidualSettings()) == math.pi / 2
    assert largest_angle(ResidualSettings(clamp="none")) is None


def test_the_bias_belongs_to_the_update() -> None:
    x, u, bias = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(8)
    join = ExponentialResidual(0.5, None)(True, False)
    assert torch.equal(join((u, bias), x, 0.0), exponential_step(x, u + bias, 0.5))
    assert torch.equal(join((u, None), x, 0.0), exponential_step(x, u, 0.5))
