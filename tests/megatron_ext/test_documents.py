"""Documents that are sequences of their own, against dense masks and a plain fp64 model."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext import SCHEMES, Documents, ModelSettings, find_documents
from megatron_ext.attention import ScaledDotProductAttention, attend_by_flash, flash_can_attend
from megatron_ext.initialize import global_names
from tests.megatron_ext import reference, small

pytestmark = pytest.mark.usefixtures("single_process")

packings = pytest.mark.parametrize("packing", small.PACKINGS)
MODELS = {
    "gpt2": small.settings("pre_norm", **small.GPT2),
    "no positions": small.settings("pre_norm", positions="none"),
    "qk_norm, z_loss": small.settings(qk_norm=True, z_loss=0.01),
    "recomputed": small.settings(recompute="full"),
    **{scheme: small.settings(scheme) for scheme in SCHEMES},
}


def test_a_small_example() -> None:
    documents = find_documents(torch.tensor([[5, 0, 7, 8, 0], [0, 0, 6, 5, 4]]), eod_id=0)
    assert documents.lengths.tolist() == [2, 3, 1, 1, 3]
    assert documents.cu_seqlens.tolist() == [0, 2, 5, 6, 7, 10]
    assert documents.cu_seqlens.dtype == torch.int32
    assert documents.position_ids.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert documents.longest == 3
    assert [rows.tolist() for rows in documents.rows_by_length] == [[[5], [6]], [[0, 1]], [[2, 3, 4], [7, 8, 9]]]
    assert documents.places.tolist() == [2, 3, 4, 5, 6, 0, 1, 7, 8, 9]


@packings
def test_positions_and_bounds_equal_a_count_token_by_token(packing: str) -> None:
    tokens, _, documents, _ = small.packed_batch(packing)
    layout = reference.Layout.of(tokens, small.EOD)
    assert torch.equal(documents.position_ids, layout.position)
    starts = (layout.position.flatten() == 0).nonzero().flatten().tolist()
    assert documents.cu_seqlens.tolist() == [*starts, tokens.numel()]


def core_attention(**changes: Any) -> ScaledDotProductAttention:
    return ScaledDotProductAttention(small.config(small.settings(**changes)), 1, AttnMaskType.causal, "self")


def heads(sequence: int, batch: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries of four heads, keys and values of two."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(sequence, batch, count, 8, generator=generator, dtype=dtype).requires_grad_() for count in (4, 2, 2)
    ]


def dense(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """Attention [sequence, batch, heads, head] through the whole matrix of scores."""
    key, value = (tensor.repeat_interleave(2, dim=2) for tensor in (key, value))
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) / math.sqrt(query.shape[-1])
    shares = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhij,jbhd->ibhd", shares, value)


@packings
def test_attention_equals_a_dense_mask_in_output_and_gradients(packing: str) -> None:
    tokens, _, documents, _ = small.packed_batch(packing)
    inputs, expected_inputs = heads(small.SEQUENCE, small.BATCH), heads(small.SEQUENCE, small.BATCH)
    attended = core_attention()(*inputs, packed_seq_params=documents)
    expected = dense(*expected_inputs, reference.Layout.of(tokens, small.EOD).hidden()).flatten(2)
    torch.testing.assert_close(attended, expected, rtol=1e-13, atol=1e-13)
    weight = torch.sin(torch.arange(attended.numel(), dtype=torch.float64)).view_as(attended)
    for result in (attended, expected):
        (result * weight).sum().backward()
    for got, wanted in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Watches what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_no_matrix_of_the_whole_sequence_is_made() -> None:
    tokens = torch.ones(1, 2048, dtype=torch.int64)
    tokens[0, [3, 100, 1500]] = small.EOD
    inputs = heads(2048, 1, torch.float32)
    with LargestTensor() as largest:
        core_attention()(*inputs, packed_seq_params=find_documents(tokens, small.EOD)).sum().backward()
    assert inputs[0].numel() <= largest.numel < 2048 * 2048 / 10


def test_other_packing_is_refused() -> None:
    with pytest.raises(ValueError, match="takes whole sequences or Documents"):
        core_attention()(*heads(6, 1), packed_seq_params=PackedSeqParams(qkv_format="thd"))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "dropout", "expected"),
    [
        ("cuda", torch.bfloat16, 64, 0.0, True),
        ("cuda", torch.bfloat16, 256, 0.0, True),
        ("cuda", torch.bfloat16, 264, 0.0, False),
        ("cuda", torch.bfloat16, 36, 0.0, False),
        ("cuda", torch.bfloat16, 64, 0.1, False),
        ("cuda", torch.float32, 64, 0.0, False),
        ("cpu", torch.bfloat16, 64, 0.0, False),
    ],
)
def test_where_flash_attention_runs(
    device: str, dtype: torch.dtype, head_dim: int, dropout: float, expected: bool
) -> None:
    assert flash_can_attend(torch.device(device), dtype, head_dim, dropout) is expected


def by_the_documentation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's variable-length attention, one sequence after another."""
    assert window_size == [-1, 0]
    assert cu_seq_k is not None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    parts = []
    for (start, stop), (key_start, key_stop) in zip(
        torch.stack([cu_seq_q[:-1], cu_seq_q[1:]], 1).tolist(),
        torch.stack([cu_seq_k[:-1], cu_seq_k[1:]], 1).tolist(),
        strict=True,
    ):
        assert stop - start <= max_q
        assert key_stop - key_start <= max_k
        q, k, v = query[start:stop], key[key_start:key_stop], value[key_start:key_stop]
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads_first, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts), torch.empty(query.shape[1], query.shape[0]), torch.empty(2, dtype=torch.uint64)


torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", by_the_documentation)  # type: ignore[no-untyped-call]


@packings
def test_what_flash_attention_is_asked_for_is_the_same(packing: str) -> None:
    """On a CPU, where torch has no such kernel: with one written from the kernel's documentation."""
    tokens, _, documents, _ = small.packed_batch(packing)
    with torch.no_grad():
        inputs = heads(small.SEQUENCE, small.BATCH)
        attended = attend_by_flash(*inputs, documents, None)
        expected = dense(*inputs, reference.Layout.of(tokens, small.EOD).hidden())
        torch.testing.assert_close(attended, expected, rtol=1e-13, atol=1e-13)
        half = attend_by_flash(*inputs, documents, 0.5 / math.sqrt(8))
        expected = dense(inputs[0] / 2, *inputs[1:], reference.Layout.of(tokens, small.EOD).hidden())
        torch.testing.assert_close(half, expected, rtol=1e-13, atol=1e-13)


def model_pass(
    model: ModelSettings, batch: tuple[Tensor, Tensor, Documents, Tensor], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Logits, weights and gradients."""
    stage = small.build(model, dtype=dtype)
    tokens, labels, documents, loss_weights = batch
    call = (tokens, documents.position_ids, None)
    logits = stage(*call, packed_seq_params=documents)[..., : model.vocab_size]
    # Megatron-core's own loss is fp32 whatever the logits are; the z-loss keeps fp64.
    losses = (
        stage(*call, labels=labels, packed_seq_params=documents)
        if model.z_loss
        else reference.cross_entropy(logits, labels)
    )
    (losses * loss_weights).sum().backward()
    parameters = global_names(stage)
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return logits.detach(), {name: parameter.detach() for name, parameter in parameters.items()}, gradients


def reference_pass(
    model: ModelSettings, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor, Documents, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients in fp64."""
    weights = {name: value.double().requires_grad_() for name, value in weights.items()}
    tokens, labels, _, loss_weights = batch
    logits = reference.gpt(weights, tokens, model, small.EOD)
    (reference.objective(logits, labels, model) * loss_weights).sum().backward()
    return logits.detach(), {name: value.grad for name, value in weights.items() if value.grad is not None}


@pytest.mark.parametrize(
    ("name", "packing"),
    [*((name, "documents of one token") for name in MODELS), *(("gpt2", p) for p in small.PACKINGS)]
    + [("geonorm", p) for p in small.PACKINGS],
)
def test_the_model_equals_a_plain_fp64_gpt_with_a_dense_mask(name: str, packing: str) -> None:
    model, batch = MODELS[name], small.packed_batch(packing)
    logits, weights, gradients = model_pass(model, batch)
    expected_logits, expected = reference_pass(model, weights, batch)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-11, atol=1e-11)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        # Where every document is one token, queries and keys have no gradient.
        assert (gradient - expected[key]).norm() <= 1e-11 * expected[key].norm() + 1e-13, key


def test_bf16_is_near_the_fp64_reference() -> None:
    model, batch = small.settings(init_std=0.1), small.packed_batch("documents of one token")
    _, weights, gradients = model_pass(model, batch, torch.bfloat16)
    _, expected = reference_pass(model, weights, batch)
    for key, gradient in gradients.items():
        cosine = F.cosine_similarity(gradient.double().flatten(), expected[key].flatten(), 0)
        assert cosine > 0.99, (key, cosine)


@pytest.mark.parametrize("changes", [{}, small.GPT2], ids=["rope", "learned"])
def test_a_document_does_not_know_what_stands_around_it(changes: dict[str, Any]) -> None:
    stage = small.build(small.settings("pre_norm", **changes)).eval()
    tokens, _, documents, _ = small.packed_batch("a document over both samples")
    with torch.no_grad():
        packed = stage(tokens, documents.position_ids, None, packed_seq_params=documents)
        for row, start, stop in [(0, 0, 10), (0, 10, 24), (1, 0, 14), (1, 14, 24)]:
            alone = tokens[row : row + 1, start:stop]
            expected = stage(alone, torch.arange(stop - start)[None], None)
            torch.testing.assert_close(packed[row : row + 1, start:stop], expected, rtol=1e-5, atol=1e-5)


def trained(model: ModelSettings, documents: Documents | None, positions: Tensor) -> dict[str, Tensor]:
    """Losses and gradients of one pass in training."""
    stage = small.build(model)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    tokens, labels, _, loss_weights = small.packed_batch("lengths that repeat")
    losses = stage(tokens, positions, None, labels=labels, packed_seq_params=documents)
    (losses * loss_weights).sum().backward()
    return {name: p.grad for name, p in global_names(stage).items()} | {"losses": losses.detach()}


@pytest.mark.parametrize("linear_bias", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_sees_the_same_documents_and_dropout_masks(dropout: float, linear_bias: bool) -> None:
    _, _, documents, _ = small.packed_batch("lengths that repeat")
    changes: dict[str, Any] = {"dropout": dropout, "linear_bias": linear_bias}
    plain, *recomputed = (
        trained(small.settings(**changes, recompute=recompute), documents, documents.position_ids)
        for recompute in ("none", "full", "selective")
    )
    for again in recomputed:
        assert all(torch.equal(again[name], value) for name, value in plain.items())
    whole = trained(small.settings(**changes), None, torch.arange(small.SEQUENCE).expand(small.BATCH, -1))
    assert not torch.equal(whole["losses"], plain["losses"])
