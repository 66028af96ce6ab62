import math
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import nn

from megatron_ext import SCHEMES, ModelSettings, ParallelSettings, build_model
from megatron_ext.head import log_frequencies
from megatron_ext.initialize import cut_for_this_rank, global_names
from megatron_ext.schemes.sphere import LerpResidual
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


def build(model: ModelSettings, seed: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    counts = small.token_counts(model.vocab_size)
    return build_model(model, ParallelSettings(), dtype=dtype, device="cpu", seed=seed, token_counts=counts)


def test_every_parameter_has_the_start_that_its_place_asks_for() -> None:
    shape = {"hidden_size": 64, "ffn_hidden_size": 128, "init_std": 0.05}
    model = small.settings(**small.GPT2 | shape | {"tie_embeddings": False})
    parameters = global_names(build(model))
    assert "embedding.position_embeddings.weight" in parameters
    assert sum(name.endswith(("qkv.bias", "proj.bias", "fc1.bias", "fc2.bias")) for name in parameters) == 16
    for name, parameter in parameters.items():
        if name == "output_layer.bias":
            expected = log_frequencies(small.token_counts(), 200).float()
            torch.testing.assert_close(parameter[:200].detach(), expected)
            assert torch.equal(parameter[200:], torch.zeros(56))
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float(not name.endswith("bias")))), name
        else:
            projection = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = 0.05 / math.sqrt(8) if projection else 0.05
            rows = parameter[:200] if "word_embeddings" in name or "output_layer" in name else parameter
            assert rows.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(rows.mean().item()) < 0.03 * std * 10, name
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(parameters[name][200:], torch.zeros(56, 64))


def scheme_model(scheme: str, residual: dict[str, Any] | None = None, **changes: Any) -> ModelSettings:
    """Wide enough for a standard deviation to be measured to 1 %."""
    shape = {"hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 384, "num_layers": 3, "init_std": 0.05}
    return small.settings(scheme, residual, **shape | changes)


def stds(model: ModelSettings) -> dict[str, float]:
    """Of the matrices of the second layer."""
    prefix = "decoder.layers.1."
    return {
        name.removeprefix(prefix): parameter.std().item()
        for name, parameter in global_names(build(model)).items()
        if name.startswith(prefix) and parameter.dim() == 2
    }


@pytest.mark.parametrize("said", [None, "scaled", "plain"])
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "deep_norm"])
def test_output_projections_start_as_the_scheme_has_it_or_as_said(scheme: str, said: str | None) -> None:
    chosen = said or ("plain" if scheme == "post_norm" else "scaled")
    output = 0.05 / math.sqrt(6) if chosen == "scaled" else 0.05
    assert stds(scheme_model(scheme, {"output_init": said})) == {
        "self_attention.linear_qkv.weight": pytest.approx(0.05, rel=0.02),
        "self_attention.linear_proj.weight": pytest.approx(output, rel=0.02),
        "mlp.linear_fc1.weight": pytest.approx(0.05, rel=0.02),
        "mlp.linear_fc2.weight": pytest.approx(output, rel=0.02),
    }


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("groups", [2, 8])
def test_deep_norm_draws_by_xavier_with_its_gain_on_values_and_what_follows(groups: int, activation: str) -> None:
    """DeepNet, arXiv 2203.00555: gain (8 L)^(-1/4) on W_v, W_o, W_1, W_2; 1 on W_q, W_k. Every matrix by itself."""
    model = scheme_model("deep_norm", num_query_groups=groups, activation=activation)
    parameters = global_names(build(model))
    gain, head, heads = 24**-0.25, 32, 8

    def xavier(rows: int, columns: int) -> Any:
        return pytest.approx(math.sqrt(2 / (rows + columns)), rel=0.02)

    for layer in range(3):
        prefix = f"decoder.layers.{layer}"
        fused = parameters[f"{prefix}.self_attention.linear_qkv.weight"].view(groups, heads // groups + 2, head, 256)
        assert fused[:, :-2].std().item() == xavier(heads * head, 256)
        assert fused[:, -2].std().item() == xavier(groups * head, 256)
        assert fused[:, -1].std().item() / gain == xavier(groups * head, 256)
        assert parameters[f"{prefix}.self_attention.linear_proj.weight"].std().item() / gain == xavier(256, 256)
        for half in parameters[f"{prefix}.mlp.linear_fc1.weight"].chunk(2 if activation == "swiglu" else 1):
            assert half.std().item() / gain == xavier(384, 256)
        assert parameters[f"{prefix}.mlp.linear_fc2.weight"].std().item() / gain == xavier(384, 256)
    assert parameters["embedding.word_embeddings.weight"][:200].std().item() == pytest.approx(0.05, rel=0.02)
    assert parameters["output_layer.weight"][:200].std().item() == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(
    ("scheme", "residual", "starts"),
    [
        ("geonorm", {"learn_alpha": True, "alpha": 0.3}, {"alpha.raw": math.log(math.expm1(0.3))}),
        ("geonorm", {"learn_angle_scale": True, "angle_scale": 1.4}, {"angle_scale.raw": math.log(math.expm1(1.4))}),
        ("proj", {"radius": "learned"}, {"alpha.raw": math.log(math.e - 1), "radius.raw": math.log(math.expm1(16.0))}),
        ("ngpt_lerp", {}, {"rate": 1 / 16}),
        ("pre_dyt", {"dyt_attention_alpha": 0.7}, {"input_layernorm.alpha": 0.7, "pre_mlp_layernorm.alpha": 1.0}),
        ("pre_dyt", {"dyt_alpha": 0.2}, {"input_layernorm.alpha": 1.0, "final_layernorm.alpha": 0.2}),
    ],
)
def test_learned_numbers_start_where_they_should(scheme: str, residual: Any, starts: dict[str, float]) -> None:
    parameters = global_names(build(scheme_model(scheme, residual, num_attention_heads=4), dtype=torch.float64))
    for ending, start in starts.items():
        found = [parameter for name, parameter in parameters.items() if name.endswith(ending)]
        per_sublayer = ending in ("alpha.raw", "angle_scale.raw", "rate")
        assert len(found) == (6 if per_sublayer else 3 if "input" in ending or "mlp" in ending else 1), ending
        for parameter in found:
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, start), rtol=1e-12, atol=0)


def test_ngpt_starts_with_a_share_of_a_twentieth_in_every_channel() -> None:
    for module in build(scheme_model("ngpt_lerp")).modules():
        if isinstance(module, LerpResidual):
            torch.testing.assert_close(module._share(), torch.full((256,), 0.05))


def test_dyt_starts_as_the_identity_of_tanh_with_alpha_by_width() -> None:
    for name, parameter in global_names(build(scheme_model("pre_dyt"))).items():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(not name.endswith("bias")))), name


def test_the_seed_and_the_name_decide() -> None:
    first, again, other = (global_names(build(small.settings(), seed=seed)) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1), name
    layers = [first[f"decoder.layers.{i}.self_attention.linear_proj.weight"] for i in range(4)]
    assert not any(torch.equal(layers[0], layer) for layer in layers[1:])


def test_bf16_weights_are_the_rounded_fp32_weights() -> None:
    exact, rounded = global_names(build(small.settings())), global_names(build(small.settings(), dtype=torch.bfloat16))
    for name, parameter in exact.items():
        assert torch.equal(parameter.bfloat16(), rounded[name]), name


def test_a_larger_vocabulary_keeps_the_padding_out() -> None:
    model = small.settings(vocab_size=300)
    counts = small.token_counts(200)
    stage = build_model(model, ParallelSettings(), dtype=torch.float32, device="cpu", seed=0, token_counts=counts)
    expected = log_frequencies(counts + [0] * 100, 300).float()
    torch.testing.assert_close(stage.output_layer.bias[:300].detach(), expected)


@pytest.mark.parametrize("tp", [2, 3])
def test_cut_divides_each_of_the_stacked_matrices_of_a_gated_projection(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, value = torch.arange(6.0)[:, None], 100 + torch.arange(6.0)[:, None]
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: tp)
    parts = []
    for tp_rank in range(tp):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda tp_rank=tp_rank: tp_rank)
        parameter = torch.nn.Parameter(torch.empty(12 // tp, 1))
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 2
        parts.append(cut_for_this_rank(torch.cat([gate, value]), parameter))
    halves = [part.chunk(2) for part in parts]
    assert torch.equal(torch.cat([half[0] for half in halves]), gate)
    assert torch.equal(torch.cat([half[1] for half in halves]), value)


def test_tied_embeddings_are_one_parameter() -> None:
    names = global_names(build(small.settings(tie_embeddings=True)))
    assert "output_layer.weight" not in names
    assert "output_layer.bias" in names
