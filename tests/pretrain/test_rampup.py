import pytest

from pretrain.config import RampupSettings, TrainSettings
from pretrain.rampup import batch_size, batch_sizes, consumed_before, samples_of, steps_by_batch


def settings(start: int, increment: int, samples: int, global_batch: int) -> TrainSettings:
    rampup = RampupSettings(start=start, increment=increment, samples=samples)
    return TrainSettings(steps=1, micro_batch=1, global_batch=global_batch, rampup=rampup)


CASES = [settings(32, 32, 1000, 128), settings(4, 2, 7, 10), settings(3, 3, 1, 9), settings(8, 8, 3000, 64)]
WITHOUT = TrainSettings(steps=1, micro_batch=1, global_batch=8)


def megatron(consumed: int, train: TrainSettings) -> int:
    """RampupBatchsizeNumMicroBatchesCalculator of Megatron-LM's num_microbatches_calculator.py, in its own words."""
    start, increment, ramup_samples = train.rampup.start, train.rampup.increment, train.rampup.samples
    assert start
    assert increment
    assert ramup_samples
    num_increments = (train.global_batch - start) // increment
    rampup_samples_per_increment = ramup_samples / num_increments
    if consumed > ramup_samples:
        return train.global_batch
    steps = int(consumed / rampup_samples_per_increment)
    return min(start + steps * increment, train.global_batch)


@pytest.mark.parametrize("train", CASES)
def test_sizes_are_megatrons(train: TrainSettings) -> None:
    assert train.rampup.samples
    for consumed in range(2 * train.rampup.samples):
        assert batch_size(consumed, train) == megatron(consumed, train), consumed
        assert batch_size(consumed, train) in batch_sizes(train)


@pytest.mark.parametrize("train", [*CASES, WITHOUT])
@pytest.mark.parametrize("consumed", [0, 5, 999, 5000])
def test_steps_are_counted_as_they_come(train: TrainSettings, consumed: int) -> None:
    taken, now = [], consumed
    for _ in range(200):
        taken.append(batch_size(now, train))
        now += taken[-1]
    for steps in (0, 1, 2, 13, 200):
        stretches = list(steps_by_batch(steps, train, consumed))
        assert [batch for batch, count in stretches for _ in range(count)] == taken[:steps]
        assert all(count > 0 for _, count in stretches)
        assert samples_of(steps, train, consumed) == sum(taken[:steps])
        assert consumed_before(steps, train, consumed + sum(taken[:steps])) == consumed


def test_no_ramp_is_one_size() -> None:
    assert batch_sizes(WITHOUT) == [8]
    assert batch_size(0, WITHOUT) == 8
    assert batch_sizes(CASES[0]) == [32, 64, 96, 128]
    assert samples_of(-3, WITHOUT) == 0


def test_what_no_step_leads_to_is_counted_back_by_the_next_ones_size() -> None:
    train = settings(8, 8, 100, 16)  # from 100 on 16, before that 8: nothing leads to 108 to 115
    assert consumed_before(1, train, 110) == 94
    assert consumed_before(2, train, 110) == 86
