import math
from typing import Any

import pytest
import torch

from megatron_ext.head import cross_entropy_with_z_loss, log_frequencies, padded_vocab_size, valid_rows
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize(
    ("vocab_size", "tp", "expected"),
    [(1, 1, 128), (128, 1, 128), (129, 1, 256), (129, 2, 256), (257, 2, 512), (100, 4, 512)],
)
def test_padded_to_a_multiple_of_128_on_each_rank(vocab_size: int, tp: int, expected: Any) -> None:
    assert padded_vocab_size(vocab_size, tp) == expected


@pytest.mark.parametrize(
    ("vocab_size", "rows", "expected"), [(256, 128, [128, 128]), (200, 128, [128, 72]), (100, 128, [100, 0])]
)
def test_valid_rows_of_two_ranks(vocab_size: int, rows: int, expected: Any) -> None:
    assert [valid_rows(vocab_size, rows, tp_rank) for tp_rank in (0, 1)] == expected


def test_log_frequencies_are_smoothed_and_padded() -> None:
    actual = log_frequencies([5, 0, 2], 4)
    expected = [math.log((c + 1) / (7 + 4)) for c in (5, 0, 2, 0)]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    assert actual.exp().sum().item() == pytest.approx(1)


@pytest.mark.parametrize("counts", [[1] * 5, [1, -1]])
def test_impossible_counts_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="token counts"):
        log_frequencies(counts, 4)


@pytest.mark.parametrize("tied", [False, True])
def test_at_the_start_the_bias_alone_gives_the_unigram_distribution(tied: bool) -> None:
    stage = small.build(small.settings(tie_embeddings=tied, init_std=1e-6))
    tokens, _, positions, _ = small.batch()
    probabilities = stage(tokens, positions, None).softmax(-1)
    counts = torch.tensor(small.token_counts()) + 1
    expected = torch.nn.functional.pad(counts / counts.sum(), (0, 56))
    torch.testing.assert_close(probabilities, expected.expand(2, 24, 256), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("output_bias", ["unigram", "learned", "none"])
def test_padding_has_no_probability_and_no_gradient(output_bias: Any) -> None:
    stage = small.build(small.settings(output_bias=output_bias))
    tokens, labels, positions, weights = small.batch()
    logits = stage(tokens, positions, None)
    assert torch.equal(logits[..., 200:], torch.full((2, 24, 56), -math.inf))
    assert logits[..., :200].isfinite().all()
    (stage(tokens, positions, None, labels=labels) * weights).sum().backward()
    for parameter in stage.output_layer.parameters():
        assert parameter.isfinite().all()
        assert torch.equal(parameter.grad[200:], torch.zeros_like(parameter.grad[200:]))
        assert (parameter.grad[:200] != 0).all()
    assert (stage.output_layer.bias is None) == (output_bias == "none")


def test_the_bias_has_the_attributes_of_a_vocabulary_parallel_parameter() -> None:
    bias = small.build(small.settings()).output_layer.bias
    assert (bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride) == (True, 0, 1)


def test_gathered_logits_are_masked_over_the_whole_vocabulary() -> None:
    stage = small.build(small.settings())
    tokens, _, positions, _ = small.batch()
    gathered = stage(tokens, positions, None, runtime_gather_output=True)
    assert torch.equal(gathered, stage(tokens, positions, None))


def test_the_sharded_state_dict_knows_the_bias() -> None:
    sharded = small.build(small.settings()).sharded_state_dict()
    assert sharded["output_layer.bias"].global_shape == (256,)
    assert sharded["output_layer.bias"].allow_shape_mismatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_z_loss_changes_the_gradient_and_not_the_reported_loss(dtype: torch.dtype) -> None:
    tokens, labels, positions, weights = small.batch()
    losses, gradients = [], []
    for z_loss in (0.0, 0.01):
        stage = small.build(small.settings(z_loss=z_loss), dtype=dtype)
        losses.append(stage(tokens, positions, None, labels=labels))
        (losses[-1] * weights).sum().backward()
        gradients.append(stage.output_layer.bias.grad)
    assert losses[1].dtype == torch.float32
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(gradients[0], gradients[1])


def test_the_z_loss_is_right_beside_a_huge_logit() -> None:
    """Where exp would overflow, against autograd in fp64."""
    logits = torch.tensor([[[3e4, -2.0, -math.inf, 1e4], [0.0, -1e5, 5.0, 4.0]]], requires_grad=True)
    labels = torch.tensor([[3, 0]])
    exact = logits.detach().double().requires_grad_()
    penalty = 1e-4 * exact.logsumexp(-1).square()
    loss = torch.nn.functional.cross_entropy(exact.transpose(1, 2), labels, reduction="none")
    (loss + penalty).sum().backward()
    actual = cross_entropy_with_z_loss(logits.clone(), labels, 1e-4)
    actual.sum().backward()
    torch.testing.assert_close(actual.double(), loss)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)
