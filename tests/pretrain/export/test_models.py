"""Every scheme with every setting: what transformers computes from the written files is what our model computes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from megatron_ext import SCHEMES, ModelSettings, ResidualSettings
from pretrain.errors import UserError
from pretrain.export.hf import model_class
from pretrain.export.logits import our_logits, their_logits
from pretrain.export.shipped.modeling_sphere_pretrain import visible
from pretrain.export.targets import Target, not_gpt2, not_llama, target_of
from tests.megatron_ext import small
from tests.pretrain.export import shipped_code
from tests.pretrain.export.exported import loaded, write

pytestmark = pytest.mark.usefixtures("single_process")

RESIDUALS: dict[str, list[dict[str, Any]]] = {
    "geonorm": [
        {},
        {"decay": "linear", "step_index": "sublayer", "alpha": 2.0, "clamp": 0.3, "radius": "learned"},
        {"decay": "none", "learn_alpha": True, "learn_angle_scale": True, "clamp": "none", "radius": 3.0},
        {"decay": "sqrt", "angle_scale": 0.5, "final_norm": "layernorm"},
        {"final_norm": "none"},
    ],
    "proj": [{}, {"learn_alpha": False, "alpha": 0.7, "angle_scale": 1.5}],
    "cayley": [{}, {"clamp": 0.5, "decay": "harmonic", "step_index": "layer"}],
    "p": [{}, {"p": 0.5, "learn_angle_scale": True}],
    "ngpt_lerp": [{}, {"alpha": 0.3, "radius": "learned", "final_norm": "layernorm"}],
    "pre_dyt": [{}, {"dyt_embedding_scale": True, "dyt_alpha": 0.4}],
}
GPT2 = {**small.GPT2, "num_query_groups": 4, "output_bias": "none"}
LLAMA = {"output_bias": "none"}
SHAPES: dict[str, dict[str, Any]] = {
    "learned positions, layernorm, gelu, biases, tied": {**small.GPT2, "num_query_groups": 2},
    "no positions, qk_norm, no output bias, every head its own keys": {
        "positions": "none",
        "qk_norm": True,
        "output_bias": "none",
        "num_query_groups": 4,
        "rope_base": 500.0,
        "norm_epsilon": 1e-3,
    },
    "qk_norm by layernorm, gelu_tanh, rope of another base": {
        "qk_norm": True,
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "rope_base": 500.0,
    },
}
CASES = [
    *((scheme, residual, {}) for scheme in SCHEMES for residual in RESIDUALS.get(scheme, [{}])),
    *((scheme, {}, shape) for scheme in SCHEMES for shape in SHAPES.values()),
]


def same(model: ModelSettings, folder: Path) -> Target:
    """Write, load and compare."""
    module = small.build(model)
    target = write(model, module, folder)
    tokens = small.batch()[0]
    ours = our_logits(module, tokens, small.VOCAB_SIZE)
    theirs = their_logits(model_class(target), folder, tokens, torch.device("cpu"))
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()
    return target


@pytest.mark.parametrize(("scheme", "residual", "changes"), CASES, ids=lambda value: str(value)[:40])
def test_own_files_compute_what_we_compute(
    scheme: str, residual: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = small.settings(scheme, residual, **{"output_bias": "learned", **changes})
    assert same(model, tmp_path).needs_code


@pytest.mark.parametrize("changes", [{}, {"linear_bias": True, "tie_embeddings": True, "rope_base": 500.0}], ids=str)
def test_llama_where_it_is_one(changes: dict[str, Any], tmp_path: Path) -> None:
    assert same(small.settings("pre_norm", **LLAMA | changes), tmp_path).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu_tanh", "tie_embeddings": False}], ids=str)
def test_gpt2_where_it_is_one(changes: dict[str, Any], tmp_path: Path) -> None:
    assert same(small.settings("pre_norm", **GPT2 | changes), tmp_path).architecture == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("shape", "change", "fault"),
    [
        (LLAMA, {"qk_norm": True}, "qk_norm=True"),
        (LLAMA, {"output_bias": "unigram"}, "output_bias=unigram"),
        (LLAMA, {"positions": "none"}, "positions=none"),
        (LLAMA, {"activation": "gelu"}, "activation=gelu"),
        (LLAMA, {"normalization": "layernorm"}, "normalization=layernorm"),
        (LLAMA, {"residual": ResidualSettings(scheme="sandwich_norm")}, "scheme sandwich_norm"),
        (GPT2, {"num_query_groups": 2}, "num_query_groups=2"),
        (GPT2, {"linear_bias": False}, "linear_bias=False"),
        (GPT2, {"positions": "rope"}, "positions=rope"),
        (GPT2, {"activation": "swiglu"}, "activation=swiglu"),
    ],
    ids=str,
)
def test_no_class_of_transformers_where_one_setting_differs(
    shape: dict[str, Any], change: dict[str, Any], fault: str
) -> None:
    model = small.settings("pre_norm", **shape)
    differences = not_llama if shape is LLAMA else not_gpt2
    assert differences(model) == []
    model = dataclasses.replace(model, **change)
    assert differences(model) == [fault]
    target = target_of(model, small.VOCAB_SIZE)
    assert target.needs_code
    assert any(fault in reason for reason in target.reasons)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A model on the sphere as any user loads it, by the code beside its weights; and ours."""
    folder = tmp_path_factory.mktemp("shipped")
    model = small.settings("proj", {}, output_bias="learned")
    module = small.build(model)
    write(model, module, folder)
    with pytest.MonkeyPatch.context() as patch:
        shipped_code.kept_in(folder / "modules", patch)
        yield AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval(), module


@torch.no_grad()
def test_loads_by_the_code_beside_the_weights(shipped: tuple[Any, Any]) -> None:
    theirs, module = shipped
    assert type(theirs).__module__.startswith("transformers_modules.")
    tokens = small.batch()[0]
    assert torch.allclose(theirs(tokens).logits, our_logits(module, tokens, small.VOCAB_SIZE), atol=1e-4)


@torch.no_grad()
def test_bf16_is_near(shipped: tuple[Any, Any], tmp_path: Path) -> None:
    model = small.settings("proj", {}, output_bias="learned")
    target = write(model, shipped[1], tmp_path, torch.bfloat16)
    theirs = model_class(target).from_pretrained(tmp_path).eval()
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.bfloat16}
    logits, exact = (each(small.batch()[0]).logits.float() for each in (theirs, shipped[0]))
    assert (logits - exact).norm() < 0.05 * exact.norm()


@torch.no_grad()
def test_without_the_code_nothing_runs(shipped: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        AutoModelForCausalLM.from_pretrained(shipped[0].config._name_or_path, trust_remote_code=False)


@pytest.mark.parametrize("positions", ["rope", "learned", "none"])
@torch.no_grad()
def test_generates_with_a_cache_as_without(positions: str, tmp_path: Path) -> None:
    model = small.settings("proj", {}, output_bias="learned", positions=positions)
    theirs = loaded(write(model, small.build(model), tmp_path), tmp_path)
    prompt = small.batch()[0][:, :6]
    how = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    how["eos_token_id"] = None
    plain = theirs.generate(prompt, use_cache=False, **how)
    whole = theirs(plain.sequences[:, :-1]).logits[:, 5:]
    for step, logits in enumerate(plain.logits):
        assert torch.allclose(logits, whole[:, step], atol=1e-4)
    for cached in (
        theirs.generate(prompt, use_cache=True, **how),
        theirs.generate(prompt, cache_implementation="static", disable_compile=True, **how),
        _padded(theirs, prompt, how),
    ):
        assert torch.equal(cached.sequences[:, -12:], plain.sequences[:, -12:])
        for with_cache, without in zip(cached.logits, plain.logits, strict=True):
            assert torch.allclose(with_cache, without, atol=1e-4)


def _padded(theirs: Any, prompt: torch.Tensor, how: dict[str, Any]) -> Any:
    """Four tokens of padding stand in front of both prompts."""
    padding = torch.full((2, 4), small.EOD)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(prompt)], dim=1)
    return theirs.generate(torch.cat([padding, prompt], dim=1), attention_mask=mask, **how)


def test_every_token_sees_something() -> None:
    """Not all attention kernels give numbers for a row that sees nothing."""
    mask = visible(torch.tensor([[0, 0, 1, 1, 1]]), 2, 3, torch.device("cpu"))
    assert mask is not None
    assert mask[0, 0].tolist() == [
        [False, False, *row] for row in ([True, False, False], [True, True, False], [True] * 3)
    ]
    mask = visible(torch.tensor([[0, 1]]), 0, 2, torch.device("cpu"))
    assert mask is not None
    assert mask[0, 0].tolist() == [[True, False], [False, True]]


@torch.no_grad()
def test_takes_the_cache_by_its_older_name(shipped: tuple[Any, Any]) -> None:
    theirs, _ = shipped
    tokens = small.batch()[0]
    cache = DynamicCache()
    parts = [theirs(part, past_key_values=cache).logits for part in tokens.split([10, 1, 13], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), theirs(tokens).logits, atol=1e-4)


def test_gives_finite_gradients_where_an_update_is_zero(tmp_path: Path) -> None:
    model = small.settings("geonorm", {"learn_alpha": True}, output_bias="none")
    module = small.build(model)
    with torch.no_grad():
        for parameter in module.decoder.layers[0].mlp.parameters():
            parameter.zero_()
    theirs = loaded(write(model, module, tmp_path), tmp_path)
    tokens = small.batch()[0]
    theirs(tokens, labels=tokens).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in theirs.parameters())
    assert theirs.model.layers[0].mlp.down_proj.weight.grad is not None


def test_a_scheme_without_a_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "fading", dataclasses.replace(SCHEMES["pre_norm"], name="fading"))
    with pytest.raises(UserError, match=r"scheme=fading is not in the modelling file; write it there"):
        target_of(small.settings("fading"), small.VOCAB_SIZE)
