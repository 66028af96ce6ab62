import copy
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megatron_ext import ResidualSettings, residual_layer_spec
from megatron_ext.attention import ScaledDotProductAttention
from megatron_ext.norms import NORMS
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


def passed(layer: nn.Module, x: Tensor, rotary: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Output and every gradient of one layer."""
    x = x.clone().requires_grad_()
    output, _ = layer(hidden_states=x, attention_mask=mask, rotary_pos_emb=rotary)
    output.backward(torch.cos(torch.arange(output.numel(), dtype=x.dtype)).view_as(output).to(output.dtype))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return gradients | {"output": output.detach(), "input": x.grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "gelu", "normalization": "layernorm"}, {"linear_bias": True}, {"qk_norm": True}],
    ids=["swiglu rmsnorm", "gelu layernorm", "biases", "qk_norm"],
)
@pytest.mark.parametrize("grad_enabled", [True, False])
def test_pre_norm_equals_the_stock_local_layer_bit_for_bit(
    dtype: torch.dtype, changes: dict[str, Any], grad_enabled: bool
) -> None:
    """Same core attention and norms on both sides, as Megatron-core's own norm refuses sequence parallelism."""
    model = small.settings("pre_norm", **changes)
    config = small.config(model, dtype)
    stock_spec = get_gpt_layer_local_spec(normalization=config.normalization)
    attention = stock_spec.submodules.self_attention.submodules
    attention.core_attention = ScaledDotProductAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = NORMS[config.normalization]
    stock_spec.submodules.input_layernorm = stock_spec.submodules.pre_mlp_layernorm = NORMS[config.normalization]
    stock = build_module(stock_spec, config=config, layer_number=1)
    source = small.build(model, dtype=dtype)
    stock.load_state_dict(source.decoder.layers[1].state_dict())
    ours = build_module(residual_layer_spec(config, model.residual), config=config, layer_number=1)
    ours.load_state_dict(stock.state_dict())

    x = torch.randn(24, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotary = source.rotary_pos_emb(24)
    if not grad_enabled:
        # As in the first pass over a recomputed layer, where the stock layer builds a graph nevertheless.
        x.requires_grad_()
        with torch.no_grad():
            pair = [layer(hidden_states=x, attention_mask=None, rotary_pos_emb=rotary)[0] for layer in (stock, ours)]
        assert torch.equal(*pair)
        assert not pair[1].requires_grad
        return
    expected, actual = passed(stock, x, rotary, None), passed(ours, x, rotary, None)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("changes", [{}, {"num_query_groups": None}, {"positions": "learned", "linear_bias": True}])
def test_pre_norm_equals_the_untouched_stock_model(changes: dict[str, Any]) -> None:
    """Against Megatron-core's own attention and norms: 1e-5, for its softmax is another kernel."""
    model = small.settings("pre_norm", output_bias="none", vocab_size=256, **changes)
    ours = small.build(model)
    config = copy.copy(ours.config)
    stock = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=256,
        max_sequence_length=small.SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute" if model.positions == "learned" else "rope",
    )
    stock.load_state_dict(ours.state_dict())
    tokens, labels, positions, weights = small.batch(256)
    future = torch.ones(small.SEQUENCE, small.SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    for stage, mask in ((ours, None), (stock, future)):
        (stage(tokens, positions, mask, labels=labels) * weights).sum().backward()
    for (name, ours_parameter), stock_parameter in zip(ours.named_parameters(), stock.parameters(), strict=True):
        error = (ours_parameter.grad - stock_parameter.grad).norm() / stock_parameter.grad.norm()
        assert error < 1e-5, (name, error)


def test_a_bare_layer_spec_puts_the_states_on_the_sphere_in_a_stock_model() -> None:
    config = small.config(small.settings())
    stock = GPTModel(
        config, residual_layer_spec(config, ResidualSettings(radius=2.0)), 256, 24, position_embedding_type="rope"
    )
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_(std=0.1)
    seen: list[Tensor] = []
    for layer in stock.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    tokens, _, positions, _ = small.batch()
    stock(tokens, positions, None)
    assert len(seen) == 4
    for state in seen:
        torch.testing.assert_close(state.norm(dim=-1), torch.full(state.shape[:2], 2.0))
