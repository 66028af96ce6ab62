"""The micro batches of one data-parallel rank, for training and for validation."""

import numpy as np
import numpy.typing as npt
import torch

from pretrain.data.batch import MicroBatch
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from pretrain.errors import UserError


class TrainingBatches:
    """Steps of training data. The only state is the number of samples consumed so far, which the caller keeps.

    A step consumes the global draws [consumed, consumed + global_batch). They are dealt to the data-parallel ranks in
    contiguous parts, so the global batch is the same for every data-parallel size and micro batch.
    """

    def __init__(
        self, reader: ShardReader, order: SampleOrder, micro_batch: int, global_batch: int, dp_rank: int, dp_size: int
    ) -> None:
        """Choose this rank's part; batch sizes count samples.

        Raises:
            UserError: the global batch is no multiple of micro batch times data-parallel size.
            ValueError: the order was made for another number of samples.
        """
        if global_batch % (micro_batch * dp_size):
            raise UserError(
                f"global batch {global_batch} is no multiple of micro batch {micro_batch} x "
                f"data-parallel size {dp_size}: change one of them"
            )
        if len(order) != len(reader):
            raise ValueError(f"the order counts {len(order)} samples, the reader {len(reader)}")
        self._reader = reader
        self._order = order
        self._micro_batch = micro_batch
        self._slots = global_batch // dp_size
        self._first_slot = dp_rank * self._slots

    def fetch(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro batches of the step that begins after ``consumed_samples`` of all ranks, in order."""
        first = consumed_samples + self._first_slot
        samples = [self._reader.read(self._order.sample_id(draw)) for draw in range(first, first + self._slots)]
        return [
            _micro_batch(samples[start : start + self._micro_batch], self._micro_batch, self._reader.sequence_length)
            for start in range(0, self._slots, self._micro_batch)
        ]


class ValidationBatches:
    """The same validation samples every time, each on exactly one data-parallel rank."""

    def __init__(self, reader: ShardReader, samples: int, micro_batch: int, dp_rank: int, dp_size: int) -> None:
        """Take the first ``samples`` samples of the reader, all of them when it has fewer.

        Every rank gets the same number of micro batches, as collectives need it; where samples run out, rows that are
        fully masked fill them, so a sum over all ranks of masked losses counts each sample once.
        """
        self._reader = reader
        self._samples = min(samples, len(reader))
        self._micro_batch = micro_batch
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    def fetch(self) -> list[MicroBatch]:
        """This rank's micro batches."""
        stride = self._micro_batch * self._dp_size
        return [self._read(start + self._dp_rank * self._micro_batch) for start in range(0, self._samples, stride)]

    def _read(self, first: int) -> MicroBatch:
        last = min(first + self._micro_batch, self._samples)
        samples = [self._reader.read(sample_id) for sample_id in range(first, last)]
        return _micro_batch(samples, self._micro_batch, self._reader.sequence_length)


def _micro_batch(samples: list[npt.NDArray[np.int64]], micro_batch: int, sequence_length: int) -> MicroBatch:
    """Stack samples of ``sequence_length + 1`` tokens; rows without a sample hold token 0 and are masked."""
    rows = np.zeros((micro_batch, sequence_length + 1), dtype=np.int64)
    loss_mask = torch.zeros(micro_batch, sequence_length)
    if samples:
        rows[: len(samples)] = samples
        loss_mask[: len(samples)] = 1.0
    tokens = torch.from_numpy(rows)
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), loss_mask)
