import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import SCHEMES, ResidualSettings, with_defaults
from megatron_ext.residual import Residual, Sublayer
from megatron_ext.retraction import Retraction, retract
from megatron_ext.schemes.sphere import PositiveNumber, RetractionResidual, largest_angle
from tests.megatron_ext import small

DEFAULTS: dict[str, dict[str, Any]] = {"p": {"p": 3.0}}


def residual(
    scheme: str,
    layer_number: int = 1,
    position: int = 0,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 3,
    **said: Any,
) -> Any:
    settings = with_defaults(ResidualSettings(scheme=scheme, **DEFAULTS.get(scheme, {}) | said))
    config = small.config(small.settings(hidden_size=8, num_layers=num_layers), dtype)
    return SCHEMES[scheme].residual(Sublayer(config, settings, layer_number, position))


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
@pytest.mark.parametrize("learn_alpha", [False, True])
@pytest.mark.parametrize("scheme", ["geonorm", "proj", "cayley", "p"])
def test_step_sizes_of_a_network_of_three_layers(
    scheme: str, learn_alpha: bool, decay: str, step_index: str, expected: list[float]
) -> None:
    said = {"alpha": 0.5, "decay": decay, "step_index": step_index, "learn_alpha": learn_alpha}
    sizes = [residual(scheme, layer, position, **said).step_size() for layer in (1, 2, 3) for position in (0, 1)]
    assert [float(size) for size in sizes] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheme", "power", "clamp", "save", "sizes"),
    [
        ("geonorm", math.inf, math.pi / 2, "output", [1, 1, 1 / 2, 1 / 2]),
        ("proj", 1.0, None, "update", [1, 2**-0.5, 3**-0.5, 1 / 2]),
        ("cayley", 2.0, None, "update", [1, 2**-0.5, 3**-0.5, 1 / 2]),
        ("p", 3.0, None, "update", [1, 2**-0.5, 3**-0.5, 1 / 2]),
    ],
)
def test_the_papers_defaults(scheme: str, power: float, clamp: float | None, save: Any, sizes: list[float]) -> None:
    modules: list[RetractionResidual] = [residual(scheme, layer, at) for layer in (1, 2) for at in (0, 1)]
    assert {module.retraction for module in modules} == {Retraction(power, clamp, save)}
    assert [float(module.step_size()) for module in modules] == pytest.approx(sizes)
    assert all(module.angle_scale() == 1.0 for module in modules)


@pytest.mark.parametrize(
    ("scheme", "said", "save"),
    [
        ("geonorm", {"clamp": "none"}, "update"),
        ("geonorm", {"clamp": 2.89}, "output"),
        ("geonorm", {"clamp": 2.9}, "update"),
        ("geonorm", {"learn_angle_scale": True}, "update"),
        ("geonorm", {"save": "update"}, "update"),
        ("proj", {"learn_alpha": False}, "output"),
        ("proj", {"learn_alpha": False, "angle_scale": 1.9}, "update"),
        ("cayley", {"learn_alpha": False}, "update"),
        ("cayley", {"learn_alpha": False, "clamp": 2.0}, "output"),
        ("p", {"p": 1.8, "learn_alpha": False}, "output"),
        ("p", {"p": 3.5, "learn_alpha": False}, "update"),
    ],
)
def test_the_output_is_kept_where_it_is_safe(scheme: str, said: dict[str, Any], save: str) -> None:
    assert residual(scheme, **said).retraction.save == save


def test_the_clamp() -> None:
    assert largest_angle(with_defaults(ResidualSettings())) == math.pi / 2
    assert largest_angle(with_defaults(ResidualSettings(clamp="none"))) is None


@pytest.mark.parametrize("start", [1e-4, 0.05, 1.0, 3.7, 19.0, 30.0])
def test_a_learned_number_starts_exactly_where_it_should(start: float) -> None:
    number = PositiveNumber(start, True, small.config(small.settings(), torch.float64))
    (raw,) = number.parameters()
    torch.nn.init.constant_(raw, raw.initial_value)
    assert number().item() == pytest.approx(start, rel=1e-12)
    number().sum().backward()
    assert raw.grad.item() == pytest.approx(-math.expm1(-start), rel=1e-8)  # the slope of softplus


def test_a_learned_number_is_calculated_in_fp32_and_a_constant_one_has_no_parameter() -> None:
    config = small.config(small.settings(), torch.bfloat16)
    assert PositiveNumber(1.0, True, config)().dtype == torch.float32
    assert list(PositiveNumber(1.0, False, config).parameters()) == []
    assert PositiveNumber(1.5, False, config)() == 1.5


def test_the_share_clamped() -> None:
    beta = torch.tensor([0.1, 1.0, 1.8, 1.9, 7.0])
    cut = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
    module = residual("p", p=2.0, clamp=1.5, angle_scale=1.0)  # 2 arctan(beta / 2) = 1.5 at beta = 1.863
    assert torch.equal(module.share_clamped(beta), cut)
    wider = residual("p", p=2.0, clamp=1.5, angle_scale=1.1)
    assert wider.share_clamped(beta).sum() == 3
    for scheme in set(SCHEMES) - {"geonorm"}:
        assert torch.equal(residual(scheme).share_clamped(beta), torch.zeros(5)), scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bias_belongs_to_the_update(scheme: str) -> None:
    x, u, bias = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(8)
    join = residual(scheme)(True, False)
    assert torch.equal(join((u, bias), x, 0.0), join((u + bias, None), x, 0.0))
    assert not torch.equal(join((u, bias), x, 0.0), join((u, None), x, 0.0))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dropout_acts_on_the_whole_update_and_only_in_training(scheme: str) -> None:
    x, u, bias = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(8)
    module = residual(scheme)
    torch.manual_seed(3)
    dropped = F.dropout(u + bias, 0.4, True)
    torch.manual_seed(3)
    assert torch.equal(module(True, False)((u, bias), x, 0.4), module(True, False)((dropped, None), x, 0.0))
    assert torch.equal(module(False, False)((u, bias), x, 0.4), module(True, False)((u, bias), x, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_observer_sees_every_part_and_changes_nothing(scheme: str, dtype: torch.dtype) -> None:
    x, u = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2, 8).to(dtype)
    module = residual(scheme, dtype=dtype)
    unseen = module(True, False)((u, None), x, 0.0)
    seen: list[Any] = []
    module.observer = lambda *parts: seen.append(parts)
    assert torch.equal(module(True, False)((u, None), x, 0.0), unseen)
    ((residual_seen, state, increment, new_state),) = seen
    assert residual_seen is module
    assert state is x
    assert torch.equal(new_state, unseen)
    assert unseen.dtype == dtype
    assert torch.equal(module.join(state, increment), unseen)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_carries_the_mark_of_sequence_parallelism(scheme: str) -> None:
    said = {"learn_alpha": True, "learn_angle_scale": True} if "learn_alpha" in SCHEMES[scheme].defaults else {}
    settings = with_defaults(ResidualSettings(scheme=scheme, **DEFAULTS.get(scheme, {}) | said))
    for sequence_parallel in (False, True):
        config = small.config(small.settings(hidden_size=8, normalization="layernorm"), torch.bfloat16)
        config.sequence_parallel = sequence_parallel
        module: Residual = SCHEMES[scheme].residual(Sublayer(config, settings, 2, 1))
        named = dict(module.named_parameters())
        assert len(named) == {"ngpt_lerp": 1, "pre_norm": 0, "pre_dyt": 0}.get(scheme, 2)
        for name, parameter in named.items():
            assert parameter.sequence_parallel is sequence_parallel, name
            assert parameter.dtype == torch.bfloat16


def test_one_step_is_the_functions() -> None:
    x, u = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    module = residual("geonorm", 3, 1, alpha=0.7)
    expected: Tensor = retract(x, u, 0.7 / 3, Retraction(math.inf, math.pi / 2))
    assert torch.equal(module(True, False)((u, None), x, 0.0), expected)


def test_a_zero_update_of_the_interpolation_has_a_bounded_gradient() -> None:
    """It has no direction: the state shrinks, and goes back to the sphere, where it was."""
    module = residual("ngpt_lerp", dtype=torch.float64)
    torch.nn.init.constant_(module.rate, module.rate.initial_value)
    x = torch.randn(2, 3, 8, dtype=torch.float64).requires_grad_()
    u = torch.zeros(2, 3, 8, dtype=torch.float64).requires_grad_()
    y = module(True, False)((u, None), x, 0.0)
    torch.testing.assert_close(y, x)
    y.sum().backward()
    assert torch.equal(u.grad, torch.zeros_like(u))
    assert x.grad.isfinite().all()
