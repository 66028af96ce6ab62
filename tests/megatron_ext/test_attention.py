from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_ext import ParallelSettings
from megatron_ext.attention import ScaledDotProductAttention
from megatron_ext.model import transformer_config
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": (4, 0)},
        {"softmax_type": "off-by-one"},
    ],
)
def test_attention_refuses_what_it_does_not_compute(change: dict[str, Any]) -> None:
    config = small.config(small.settings())
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=next(iter(change))):
        ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self")


def test_attention_refuses_other_masks_packing_and_caches() -> None:
    config = small.config(small.settings())
    with pytest.raises(ValueError, match="attn_mask_type"):
        ScaledDotProductAttention(config, 1, AttnMaskType.padding, "self")
    attention = ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self")
    whole, part = torch.randn(6, 2, 4, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="no bias, cache or packing"):
        attention(part, whole, whole)
    with pytest.raises(ValueError, match="no bias, cache or packing"):
        attention(whole, whole, whole, packed_seq_params=object())


def dropping(**parallel: Any) -> ScaledDotProductAttention:
    config = transformer_config(small.settings(dropout=0.4), ParallelSettings(**parallel), torch.float64)
    return ScaledDotProductAttention(config, 1, AttnMaskType.causal, "self")


def inputs(batch: int) -> list[Tensor]:
    """Queries of four heads, keys and values of two, the same for every sample of the batch."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 1, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).expand(-1, batch, -1, -1) for s in shapes]


def test_dropout_keeps_the_mean_over_many_masks_and_nothing_in_evaluation() -> None:
    attention = dropping()
    attended = attention(*inputs(20_000))
    expected = attention.eval()(*inputs(1))
    assert torch.equal(expected, attention(*inputs(1)))
    error = (attended.mean(1, keepdim=True) - expected) / (attended.std(1, keepdim=True) / 20_000**0.5)
    assert 0.5 < error.std() < 1.5
    assert error.abs().max() < 6
    # The first query sees one key: its weight is dropped, or grown.
    first = attended[0] / expected[0]
    dropped = first == 0
    assert dropped.double().mean().item() == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close(first[~dropped], torch.full_like(first[~dropped], 1 / 0.6))


@pytest.mark.parametrize("shared_stream_is_used", [False, True])
def test_dropout_takes_each_ranks_own_random_numbers(shared_stream_is_used: bool) -> None:
    """A fork of its own, but not under sequence parallelism, where the block has forked already."""
    attention = dropping(tp=2, sp=True) if shared_stream_is_used else dropping(tp=2)
    tensor_parallel.model_parallel_cuda_manual_seed(9)
    expected = torch.rand(3)
    tensor_parallel.model_parallel_cuda_manual_seed(9)
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
    attention(*inputs(1))
    assert torch.equal(torch.rand(3), expected) is not shared_stream_is_used
    now = tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    assert torch.equal(now, tracked) is shared_stream_is_used
