"""The batch of each step: `train.global_batch`, or on the way there; a function of the consumed samples alone."""

from collections.abc import Iterator

from pretrain.config import TrainSettings


def batch_size(consumed_samples: int, train: TrainSettings) -> int:
    """Samples of the step that follows ``consumed_samples``, as Megatron-LM's ``--rampup-batch-size`` has them."""
    rampup = train.rampup
    if rampup.start is None or rampup.increment is None or rampup.samples is None:
        return train.global_batch
    raises = len(batch_sizes(train)) - 1
    return min(train.global_batch, rampup.start + consumed_samples * raises // rampup.samples * rampup.increment)


def batch_sizes(train: TrainSettings) -> list[int]:
    """Every size that a step may have, rising."""
    rampup = train.rampup
    if rampup.start is None or rampup.increment is None:
        return [train.global_batch]
    return [*range(rampup.start, train.global_batch, rampup.increment), train.global_batch]


def steps_by_batch(steps: int, train: TrainSettings, consumed_samples: int = 0) -> Iterator[tuple[int, int]]:
    """(samples of a step, number of such steps) of the ``steps`` that follow, in order."""
    while steps > 0:
        batch, count = batch_size(consumed_samples, train), steps
        if batch < train.global_batch:
            count = min(steps, -(-(_end_of(batch, train) - consumed_samples) // batch))
        yield batch, count
        steps, consumed_samples = steps - count, consumed_samples + count * batch


def _end_of(batch: int, train: TrainSettings) -> int:
    """Consumed samples from which on steps are larger than ``batch``."""
    sizes = batch_sizes(train)
    assert train.rampup.samples is not None
    return -(-(sizes.index(batch) + 1) * train.rampup.samples // (len(sizes) - 1))


def samples_of(steps: int, train: TrainSettings, consumed_samples: int = 0) -> int:
    """Samples that the ``steps`` take which follow ``consumed_samples``."""
    return sum(batch * count for batch, count in steps_by_batch(steps, train, consumed_samples))


def consumed_before(steps: int, train: TrainSettings, consumed_samples: int) -> int:
    """Consumed samples in front of the ``steps`` that led to ``consumed_samples``; below 0 where there were fewer.

    Where no such step could lead there, as the run had other settings, it is taken to be as large as the next one.
    """
    largest_first = batch_sizes(train)[::-1]
    for _ in range(steps):
        consumed_samples -= next(
            (batch for batch in largest_first if batch_size(consumed_samples - batch, train) == batch),
            batch_size(consumed_samples, train),
        )
    return consumed_samples
