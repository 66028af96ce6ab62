from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_ext.attention import ScaledDotProductAttention
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize(
    "change",
    [
        {"context_parallel_size": 2},
        {"attention_dropout": 0.1},
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
    with pytest.raises(ValueError, match="no packing, attention bias or cache"):
        attention(part, whole, whole)
    with pytest.raises(ValueError, match="no packing, attention bias or cache"):
        attention(whole, whole, whole, packed_seq_params=object())
