import math

import pytest
import torch
from megatron.core import parallel_state
from torch import nn

from megatron_ext import ModelSettings, ParallelSettings, build_model
from megatron_ext.head import log_frequencies
from megatron_ext.initialize import _cut, global_names
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
        parts.append(_cut(torch.cat([gate, value]), parameter))
    halves = [part.chunk(2) for part in parts]
    assert torch.equal(torch.cat([half[0] for half in halves]), gate)
    assert torch.equal(torch.cat([half[1] for half in halves]), value)


def test_tied_embeddings_are_one_parameter() -> None:
    names = global_names(build(small.settings(tie_embeddings=True)))
    assert "output_layer.weight" not in names
    assert "output_layer.bias" in names
