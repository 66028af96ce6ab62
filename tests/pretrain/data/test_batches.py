import pytest
import torch

from pretrain.data.batch import MicroBatch
from pretrain.data.batches import TrainingBatches, ValidationBatches
from pretrain.data.manifest import Manifest
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from pretrain.errors import UserError
from tests.pretrain.data.small import SEQUENCE_LENGTH

GLOBAL_BATCH = 24


@pytest.fixture
def reader(manifest: Manifest) -> ShardReader:
    return ShardReader(manifest, "train", SEQUENCE_LENGTH)


def training(reader: ShardReader, micro_batch: int, dp_rank: int, dp_size: int) -> TrainingBatches:
    order = SampleOrder(reader.shard_sizes, seed=11)
    return TrainingBatches(reader, order, micro_batch, GLOBAL_BATCH, dp_rank, dp_size)


def global_batch(reader: ShardReader, micro_batch: int, dp_size: int, consumed: int) -> torch.Tensor:
    """Tokens of a step on all data-parallel ranks, in slot order."""
    parts = [training(reader, micro_batch, dp_rank, dp_size).fetch(consumed) for dp_rank in range(dp_size)]
    assert all(len(part) == GLOBAL_BATCH // micro_batch // dp_size for part in parts)
    return torch.cat([micro.tokens for part in parts for micro in part])


def test_a_micro_batch_is_samples_and_the_tokens_after_them(reader: ShardReader) -> None:
    order = SampleOrder(reader.shard_sizes, seed=11)
    first = training(reader, 4, 0, 1).fetch(48)[1]
    for row in range(4):
        sample = torch.from_numpy(reader.read(order.sample_id(48 + 4 + row)))
        assert torch.equal(first.tokens[row], sample[:-1])
        assert torch.equal(first.labels[row], sample[1:])
    assert first.tokens.dtype == first.labels.dtype == torch.int64
    assert first.loss_mask.dtype == torch.float32
    assert torch.equal(first.loss_mask, torch.ones(4, SEQUENCE_LENGTH))


def test_global_batches_depend_on_the_counter_alone(reader: ShardReader) -> None:
    # Far enough for two changes of epoch, none of them at the border of a step.
    steps = 2 * len(reader) // GLOBAL_BATCH + 2
    assert len(reader) % GLOBAL_BATCH
    whole = training(reader, GLOBAL_BATCH, 0, 1)
    reference = [whole.fetch(step * GLOBAL_BATCH)[0].tokens for step in range(steps)]
    layouts = [(1, 1), (3, 1), (4, 2), (12, 2), (3, 4), (6, 4), (8, 3)]
    for step in range(steps):
        micro_batch, dp_size = layouts[step % len(layouts)]
        resumed = global_batch(reader, micro_batch, dp_size, step * GLOBAL_BATCH)
        assert torch.equal(resumed, reference[step])


def test_an_epoch_gives_every_sample_once(reader: ShardReader) -> None:
    order = SampleOrder(reader.shard_sizes, seed=11)
    whole = TrainingBatches(reader, order, 1, 1, 0, 1)
    drawn = [tuple(whole.fetch(draw)[0].tokens[0].tolist()) for draw in range(len(reader))]
    stored = [tuple(reader.read(sample_id)[:-1].tolist()) for sample_id in range(len(reader))]
    assert drawn != stored
    assert sorted(drawn) == sorted(stored)


def test_batches_that_do_not_divide_are_refused(reader: ShardReader) -> None:
    with pytest.raises(UserError) as error:
        training(reader, 5, 0, 2)
    assert str(error.value) == (
        "global batch 24 is no multiple of micro batch 5 x data-parallel size 2: change one of them"
    )


def test_an_order_of_other_samples_is_refused(reader: ShardReader) -> None:
    with pytest.raises(ValueError, match="the order counts 7 samples"):
        TrainingBatches(reader, SampleOrder([3, 4], seed=0), 1, 1, 0, 1)


def validation(manifest: Manifest, samples: int, micro_batch: int, dp_size: int) -> list[list[MicroBatch]]:
    reader = ShardReader(manifest, "validation", SEQUENCE_LENGTH)
    return [ValidationBatches(reader, samples, micro_batch, dp_rank, dp_size).fetch() for dp_rank in range(dp_size)]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 13, 10**6])
def test_validation_counts_each_sample_once(manifest: Manifest, dp_size: int, samples: int) -> None:
    reader = ShardReader(manifest, "validation", SEQUENCE_LENGTH)
    expected = [tuple(reader.read(sample_id).tolist()) for sample_id in range(min(samples, len(reader)))]
    assert len(reader) % 4
    ranks = validation(manifest, samples, 4, dp_size)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    counted = []
    for micro in (micro for micro_batches in ranks for micro in micro_batches):
        assert micro.tokens.shape == micro.labels.shape == micro.loss_mask.shape == (4, SEQUENCE_LENGTH)
        for tokens, labels, mask in zip(micro.tokens, micro.labels, micro.loss_mask, strict=True):
            assert mask.unique().numel() == 1
            if mask[0]:
                counted.append((int(tokens[0]), *labels.tolist()))
                assert torch.equal(tokens[1:], labels[:-1])
    assert sorted(counted) == sorted(expected)


def test_validation_is_the_same_every_time(manifest: Manifest) -> None:
    batches = ValidationBatches(ShardReader(manifest, "validation", SEQUENCE_LENGTH), 9, 4, 1, 2)
    for first, second in zip(batches.fetch(), batches.fetch(), strict=True):
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.loss_mask, second.loss_mask)
