import dataclasses
from typing import Any

import pytest
from megatron.core.transformer.identity_op import IdentityOp

from megatron_ext import SCHEMES, ModelSettings, ResidualSettings, residual_block_spec, with_defaults
from megatron_ext.norms import DynamicTanh, LayerNorm, RMSNorm
from megatron_ext.schemes.additive import dyt_starts
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")

FIELDS = [field.name for field in dataclasses.fields(ResidualSettings) if field.name != "scheme"]
WITHOUT_FINAL_NORM = ("post_norm", "deep_norm", "keel")
SUBLAYERS = (".self_attention.", ".mlp.")
ADDED: list[tuple[str, dict[str, Any]]] = [
    *((scheme, {}) for scheme in SCHEMES),
    ("geonorm", {"learn_alpha": True}),
    ("geonorm", {"learn_alpha": True, "learn_angle_scale": True, "radius": "learned"}),
    ("proj", {"learn_alpha": False, "final_norm": "none"}),
    ("proj", {"learn_angle_scale": True, "final_norm": "layernorm"}),
    ("cayley", {"final_norm": "rmsnorm", "radius": 2.0}),
    ("p", {"radius": "learned"}),
    ("ngpt_lerp", {"radius": "learned", "final_norm": "none"}),
    ("ngpt_lerp", {"final_norm": "layernorm"}),
]


def residual(scheme: str, **said: Any) -> ResidualSettings:
    return ResidualSettings(scheme=scheme, **small.REQUIRED.get(scheme, {}) | said)


def outside(model: ModelSettings) -> dict[str, int]:
    """Sizes of the parameters outside attention, MLP, embedding and output layer."""
    stage = small.build(model, device="meta")
    return {
        name: parameter.numel()
        for name, parameter in stage.named_parameters()
        if name.startswith("decoder.") and not any(part in name for part in SUBLAYERS)
    }


@pytest.mark.parametrize("normalization", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("scheme", "said"), ADDED)
def test_a_model_has_as_many_parameters_as_its_scheme_says(
    scheme: str, said: dict[str, Any], normalization: str
) -> None:
    model = small.settings(scheme, said, normalization=normalization, linear_bias=True, num_layers=3)
    expected = SCHEMES[scheme].parameters(small.config(model), with_defaults(model.residual))
    assert sum(outside(model).values()) == expected


@pytest.mark.parametrize(
    ("scheme", "said", "expected"),
    [
        ("geonorm", {}, 32),
        ("geonorm", {"learn_alpha": True, "learn_angle_scale": True, "radius": "learned"}, 32 + 4 * 4 + 1),
        ("proj", {}, 32 + 8),
        ("pre_norm", {}, 9 * 32),
        ("post_norm", {}, 8 * 32),
        ("deep_norm", {}, 8 * 32),
        ("sandwich_norm", {}, 17 * 32),
        ("peri_ln", {}, 18 * 32),
        ("pre_dyt", {}, 9 * 65),
        ("pre_dyt", {"dyt_embedding_scale": True}, 9 * 65 + 1),
        ("keel", {}, 16 * 32),
        ("ngpt_lerp", {}, 9 * 32),
    ],
)
def test_four_layers_of_width_32(scheme: str, said: dict[str, Any], expected: int) -> None:
    assert sum(outside(small.settings(scheme, said)).values()) == expected


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_a_frozen_description(name: str) -> None:
    scheme = SCHEMES[name]
    assert scheme.name == name
    assert "arXiv" in scheme.source
    assert scheme.flops(2000) == 2 * scheme.flops(1000) > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.name = "other"


def test_the_sources() -> None:
    numbers = {
        "geonorm": "2601.22095",
        "proj": "2608.02668",
        "cayley": "2608.02668",
        "p": "2608.02668",
        "deep_norm": "2203.00555",
        "sandwich_norm": "2105.13290",
        "peri_ln": "2502.02732",
        "pre_dyt": "2503.10622",
        "keel": "2601.19895",
        "ngpt_lerp": "2410.01131",
        "pre_norm": "2002.04745",
        "post_norm": "1706.03762",
    }
    assert {name: number in SCHEMES[name].source for name, number in numbers.items()} == dict.fromkeys(SCHEMES, True)


@pytest.mark.parametrize("name", SCHEMES)
def test_defaults_are_filled_in_once(name: str) -> None:
    settings = with_defaults(residual(name))
    for field, value in SCHEMES[name].defaults.items():
        assert getattr(settings, field) == value
    assert with_defaults(settings) == settings


def test_what_was_said_beats_the_default() -> None:
    said = {"decay": "none", "learn_alpha": False, "alpha": 0.3, "clamp": 1.0, "radius": 2.0}
    settings = with_defaults(residual("proj", **said))
    assert {name: getattr(settings, name) for name in said} == said
    assert settings.step_index == "sublayer"


SAMPLES: dict[str, Any] = {
    "p": 2.0,
    "decay": "sqrt",
    "step_index": "layer",
    "alpha": 1.0,
    "learn_alpha": False,
    "angle_scale": 1.0,
    "learn_angle_scale": False,
    "clamp": "none",
    "radius": "sqrt_hidden",
    "save": "update",
    "final_norm": "rmsnorm",
    "output_init": "plain",
    "dyt_attention_alpha": 1.0,
    "dyt_alpha": 1.0,
    "dyt_embedding_scale": True,
}
STEPS = set(FIELDS) - {"p", "dyt_attention_alpha", "dyt_alpha", "dyt_embedding_scale"}
MEANINGFUL = {
    "geonorm": STEPS,
    "proj": STEPS,
    "cayley": STEPS,
    "p": STEPS | {"p"},
    "ngpt_lerp": {"alpha", "radius", "final_norm", "output_init"},
    "pre_norm": {"output_init"},
    "sandwich_norm": {"output_init"},
    "peri_ln": {"output_init"},
    "pre_dyt": {"output_init", "dyt_attention_alpha", "dyt_alpha", "dyt_embedding_scale"},
    "post_norm": {"output_init"},
    "deep_norm": set(),
    "keel": {"output_init"},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_setting_that_means_nothing_to_the_scheme_is_refused_by_its_name(name: str, field: str) -> None:
    said = residual(name, **{field: SAMPLES[field]})
    if field in MEANINGFUL[name]:
        assert getattr(with_defaults(said), field) == SAMPLES[field]
        return
    with pytest.raises(ValueError, match=f"means nothing to the scheme {name}; remove it") as refusal:
        with_defaults(said)
    message = str(refusal.value)
    assert message.startswith(f"model.residual.{field}={SAMPLES[field]}: ")
    assert "\n" not in message


def test_a_missing_exponent_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^model\.residual\.p is missing: the scheme p has no default for it$"):
        with_defaults(ResidualSettings(scheme="p"))


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown residual scheme 'postnorm'; known: geonorm, proj, cayley, p, ngpt"):
        residual_block_spec(small.config(small.settings()), ResidualSettings(scheme="postnorm"))


@pytest.mark.parametrize("normalization", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_final_norm(name: str, normalization: str) -> None:
    config = small.config(small.settings(name, normalization=normalization))
    block = residual_block_spec(config, residual(name))
    assert len(block.layer_specs) == config.num_layers
    if name in WITHOUT_FINAL_NORM:
        assert block.layer_norm is None
    elif name == "pre_dyt":
        assert block.layer_norm.module is DynamicTanh
    else:
        assert block.layer_norm is {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[normalization]


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].on_sphere])
def test_the_final_norm_of_the_sphere_can_be_chosen(name: str) -> None:
    config = small.config(small.settings())
    chosen = {"rmsnorm": RMSNorm, "layernorm": LayerNorm, "none": None}
    for said, norm in chosen.items():
        assert residual_block_spec(config, residual(name, final_norm=said)).layer_norm is norm


@pytest.mark.parametrize("name", SCHEMES)
def test_the_norms_in_front_of_the_sublayers(name: str) -> None:
    stage = small.build(small.settings(name), device="meta")
    expected = IdentityOp
    if name in ("pre_norm", "sandwich_norm", "peri_ln", "keel"):
        expected = RMSNorm
    elif name == "pre_dyt":
        expected = DynamicTanh
    for layer in stage.decoder.layers:
        assert type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is expected


@pytest.mark.parametrize("name", SCHEMES)
def test_the_entry_stands_in_the_networks_first_layer_alone(name: str) -> None:
    entries = [layer.entry for layer in small.build(small.settings(name), device="meta").decoder.layers]
    assert (entries[0] is not None) == (SCHEMES[name].on_sphere or name == "peri_ln")
    assert entries[1:] == [None, None, None]


@pytest.mark.parametrize(
    ("hidden_size", "expected"),
    [
        (64, (1.0, 1.0)),
        (1024, (1.0, 1.0)),
        (2048, (1.0, 0.5)),
        (4096, (0.8, 0.2)),
        (5120, (0.8, 0.2)),
        (8192, (0.2, 0.05)),
    ],
)
def test_dyt_starts_by_width_unless_said(hidden_size: int, expected: tuple[float, float]) -> None:
    config = small.config(small.settings("pre_dyt", hidden_size=hidden_size))
    assert dyt_starts(config, with_defaults(residual("pre_dyt"))) == expected
    said = with_defaults(residual("pre_dyt", dyt_attention_alpha=0.7))
    assert dyt_starts(config, said) == (0.7, expected[1])
    assert dyt_starts(config, dataclasses.replace(said, dyt_alpha=0.1)) == (0.7, 0.1)
