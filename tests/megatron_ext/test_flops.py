"""The formula against PyTorch's own counter at work on the real model."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext import SCHEMES
from megatron_ext.flops import flops_per_token
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_query_groups": None, "activation": "gelu"}, {"tie_embeddings": True, "num_layers": 2}],
    ids=["grouped swiglu", "gelu", "tied"],
)
def test_a_forward_pass_is_a_third(changes: dict[str, Any]) -> None:
    # A vocabulary that needs no padding: the padding's logits are computed and not counted.
    model = small.settings(vocab_size=256, **changes)
    tokens, _, positions, _ = small.batch()
    stage = small.build(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        stage(tokens, positions, None)
    assert counter.get_total_flops() * 3 == flops_per_token(model).model * tokens.numel()


def test_a_backward_pass_is_two_forward_passes() -> None:
    model = small.settings(vocab_size=256)
    tokens, labels, positions, _ = small.batch()
    stage = small.build(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        stage(tokens, positions, None, labels=labels).sum().backward()
    assert counter.get_total_flops() == flops_per_token(model).model * tokens.numel()


def test_selective_recomputation_repeats_the_mlp() -> None:
    model = small.settings(vocab_size=256, recompute="selective")
    tokens, labels, positions, _ = small.batch()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    stage = small.build(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        stage(tokens, positions, None, labels=labels).sum().backward()
    flops = flops_per_token(model)
    assert counter.get_total_flops() == (flops.model + flops.mlp / 3) * tokens.numel()


def test_by_hand() -> None:
    model = small.settings(num_layers=2, hidden_size=8, num_attention_heads=2, num_query_groups=1, ffn_hidden_size=16)
    flops = flops_per_token(dataclasses.replace(model, sequence_length=10, vocab_size=100))
    assert flops.layers == 6 * 2 * (8 * 16 + 8 * 8 + 3 * 8 * 16)
    assert flops.mlp == 6 * 2 * 3 * 8 * 16
    assert flops.head == 6 * 8 * 100
    assert flops.attention == 12 * 2 * 8 * 10
    assert flops.residual == 3 * 2 * SCHEMES["geonorm"].flops(8)


def test_the_vocabulary_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size is not set"):
        flops_per_token(small.settings(vocab_size=None))
