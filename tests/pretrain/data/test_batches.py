from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pretrain.data.batch import micro_batches
from pretrain.data.batches import Source, TrainingBatches, ValidationBatches
from pretrain.data.manifest import Manifest
from pretrain.data.mixture import Mixture, Share, Stage, next_stage
from pretrain.data.order import SampleOrder
from pretrain.data.progress import DataProgress
from pretrain.data.reader import Rows, ShardReader
from pretrain.errors import UserError
from tests.pretrain.data.small import SEQUENCE_LENGTH

GLOBAL_BATCH, SEED = 24, 11


@pytest.fixture
def reader(manifest: Manifest) -> ShardReader:
    return ShardReader(manifest, "train", SEQUENCE_LENGTH)


def share(reader: ShardReader, weight: float = 1.0, max_epochs: int | None = None) -> Share:
    return Share(reader.manifest.fingerprint, "", len(reader), weight, max_epochs, 0)


def training(
    readers: Sequence[ShardReader], stages: Sequence[Stage], micro_batch: int, dp_rank: int, dp_size: int
) -> TrainingBatches:
    mixture = Mixture(stages, SEED)
    sources = [
        Source(reader, SampleOrder(reader.shard_sizes, SEED, mixture.orders[reader.manifest.fingerprint]))
        for reader in readers
    ]
    return TrainingBatches(sources, mixture, micro_batch, GLOBAL_BATCH, dp_rank, dp_size)


def alone(reader: ShardReader, micro_batch: int, dp_rank: int, dp_size: int) -> TrainingBatches:
    return training([reader], [next_stage([], SEED, 0, [share(reader)])], micro_batch, dp_rank, dp_size)


def step(number: int) -> np.ndarray:
    return np.arange(number * GLOBAL_BATCH, (number + 1) * GLOBAL_BATCH)


def test_a_rank_gets_its_slots_of_the_step(reader: ShardReader) -> None:
    order = SampleOrder(reader.shard_sizes, SEED)
    rows = alone(reader, 4, 1, 2).read(step(2))
    assert rows.tokens.dtype == np.int64
    assert rows.sound.all()
    for slot in range(12):
        np.testing.assert_array_equal(rows.tokens[slot], reader.read(order.sample_id(48 + 12 + slot)))


def test_global_batches_depend_on_the_draws_alone(reader: ShardReader) -> None:
    # Far enough for two changes of epoch, none of them at the border of a step.
    steps = 2 * len(reader) // GLOBAL_BATCH + 2
    assert len(reader) % GLOBAL_BATCH
    whole = alone(reader, GLOBAL_BATCH, 0, 1)
    layouts = [(1, 1), (3, 1), (4, 2), (12, 2), (3, 4), (6, 4), (8, 3), (3, 8)]
    for number in range(steps):
        micro_batch, dp_size = layouts[number % len(layouts)]
        parts = [alone(reader, micro_batch, dp_rank, dp_size).read(step(number)) for dp_rank in range(dp_size)]
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), whole.read(step(number)).tokens)


def two(manifest: Manifest) -> list[ShardReader]:
    """Two data sets with samples of their own: both splits of the small one, each as if it were a training split."""
    splits = manifest.splits
    renamed = [
        Manifest(**vars(manifest) | {"splits": {"train": splits[split]}, "fingerprint": split})
        for split in ("train", "validation")
    ]
    return [ShardReader(other, "train", SEQUENCE_LENGTH) for other in renamed]


def test_a_mixture_gives_every_sample_once_an_epoch_whatever_the_layout(manifest: Manifest) -> None:
    """Restarts at random steps, each with other data-parallel sizes and micro batches."""
    readers = two(manifest)
    stages = [next_stage([], SEED, 0, [share(readers[0], 3.0, 2), share(readers[1], 1.0, 3)])]
    total = 2 * len(readers[0]) + 3 * len(readers[1])
    whole = training(readers, stages, 1, 0, 1)
    generator = np.random.default_rng(4)
    counts: Counter[tuple[int, ...]] = Counter()
    progress, number, steps = DataProgress(stages), 0, total // GLOBAL_BATCH
    while number < steps:
        dp_size = int(generator.choice([1, 2, 3, 4, 8]))
        micro_batch = int(generator.choice([1, GLOBAL_BATCH // dp_size]))
        ranks = [training(two(manifest), stages, micro_batch, dp_rank, dp_size) for dp_rank in range(dp_size)]
        for _ in range(min(steps - number, int(generator.integers(1, 30)))):
            draws = progress.draws(number * GLOBAL_BATCH, GLOBAL_BATCH)
            tokens = np.concatenate([rank.read(draws).tokens for rank in ranks])
            np.testing.assert_array_equal(tokens, whole.read(draws).tokens)
            counts.update(map(tuple, tokens.tolist()))
            number += 1
    rest = np.arange(steps * GLOBAL_BATCH, total)
    numbers, own = Mixture(stages, SEED).locate(rest)
    for place, draw in zip(numbers.tolist(), own.tolist(), strict=True):
        order = SampleOrder(readers[place].shard_sizes, SEED)
        counts[tuple(readers[place].read(order.sample_id(draw)).tolist())] += 1
    expected: Counter[tuple[int, ...]] = Counter()
    for reader, epochs in zip(readers, (2, 3), strict=True):
        for sample_id in range(len(reader)):
            expected[tuple(reader.read(sample_id).tolist())] += epochs
    assert counts == expected


def test_skipped_draws_are_skipped_alike_on_all_ranks(reader: ShardReader) -> None:
    progress = DataProgress()
    progress.skip(30, 50, consumed_samples=GLOBAL_BATCH)
    draws = progress.draws(GLOBAL_BATCH, GLOBAL_BATCH)
    assert draws.tolist() == [*range(24, 30), *range(80, 98)]
    order = SampleOrder(reader.shard_sizes, SEED)
    for dp_size in (1, 3):
        rows = [alone(reader, 1, dp_rank, dp_size).read(draws).tokens for dp_rank in range(dp_size)]
        np.testing.assert_array_equal(
            np.concatenate(rows), [reader.read(order.sample_id(draw)) for draw in draws.tolist()]
        )


def test_a_rank_between_the_ends_of_a_pipeline_gets_rows_without_reading(reader: ShardReader) -> None:
    rows = alone(reader, 4, 1, 2).stand_in(step(0))
    assert rows.tokens.shape == (12, SEQUENCE_LENGTH + 1)
    assert rows.sound.all()


def test_batches_that_do_not_divide_are_refused(reader: ShardReader) -> None:
    with pytest.raises(UserError) as error:
        alone(reader, 5, 0, 2)
    assert str(error.value) == (
        "global batch 24 is no multiple of micro batch 5 x data-parallel size 2: change one of them"
    )


def test_an_order_of_other_samples_is_refused(reader: ShardReader) -> None:
    with pytest.raises(ValueError, match="the order counts 7 samples"):
        TrainingBatches(
            [Source(reader, SampleOrder([3, 4], seed=0))], Mixture([Stage(0, (share(reader),))], 0), 1, 1, 0, 1
        )


def test_micro_batches_are_samples_and_the_tokens_after_them() -> None:
    tokens = torch.arange(6 * 5).view(6, 5)
    sound = torch.tensor([True, True, False, True, True, True])
    cut = micro_batches(tokens, sound, 2)
    assert len(cut) == 3
    for number, micro in enumerate(cut):
        rows = tokens[2 * number : 2 * number + 2]
        assert torch.equal(micro.tokens, rows[:, :-1])
        assert torch.equal(micro.labels, rows[:, 1:])
        assert micro.loss_mask.dtype == torch.float32
    assert [micro.loss_mask.sum(dim=1).tolist() for micro in cut] == [[4, 4], [0, 4], [4, 4]]


def validation(manifest: Manifest, samples: int, micro_batch: int, dp_size: int) -> list[Rows]:
    reader = ShardReader(manifest, "validation", SEQUENCE_LENGTH)
    return [ValidationBatches(reader, samples, micro_batch, dp_rank, dp_size).read() for dp_rank in range(dp_size)]


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 13, 10**6])
def test_validation_counts_each_sample_once(manifest: Manifest, dp_size: int, samples: int) -> None:
    reader = ShardReader(manifest, "validation", SEQUENCE_LENGTH)
    expected = [tuple(reader.read(sample_id).tolist()) for sample_id in range(min(samples, len(reader)))]
    ranks = validation(manifest, samples, 4, dp_size)
    assert len({len(rows.tokens) for rows in ranks}) == 1
    assert all(len(rows.tokens) % 4 == 0 for rows in ranks)
    counted = [tuple(row) for rows in ranks for row in rows.tokens[rows.sound].tolist()]
    assert sorted(counted) == sorted(expected)
    assert all((rows.tokens[~rows.sound] == manifest.eod_id).all() for rows in ranks)


def test_validation_is_the_same_every_time(manifest: Manifest) -> None:
    batches = ValidationBatches(ShardReader(manifest, "validation", SEQUENCE_LENGTH), 9, 4, 1, 2)
    first, second = batches.read(), batches.read()
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.sound, second.sound)
