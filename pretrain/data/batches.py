"""The samples of one data-parallel rank, for training and for validation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pretrain.data.mixture import Mixture
from pretrain.data.order import SampleOrder
from pretrain.data.reader import Rows, ShardReader
from pretrain.errors import UserError


@dataclass(frozen=True)
class Source:
    """A data set's samples and their order."""

    reader: ShardReader
    order: SampleOrder


class Batches(Protocol):
    """Steps of training data for one data-parallel rank.

    Attributes:
        micro_batch, global_batch: in samples; a step may take a smaller batch.
    """

    micro_batch: int
    global_batch: int

    def read(self, draws: npt.NDArray[np.int64]) -> Rows:
        """This rank's samples of the step that takes the global ``draws``, in order."""

    def stand_in(self, draws: npt.NDArray[np.int64]) -> Rows:
        """Rows of the same shape, all sound and all token 0, for a rank that does not look at tokens."""

    def locate(self, draws: npt.NDArray[np.int64]) -> list[tuple[str, int]]:
        """Data set and stored sample of rising global ``draws``, of any rank; empty where nothing is stored."""


class TrainingBatches:
    """Steps of training data. The only state is how far the run is, which the caller keeps.

    A step takes some global draws. They are dealt to the data-parallel ranks in contiguous parts, so the global batch
    is the same for every data-parallel size and micro batch.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        mixture: Mixture,
        micro_batch: int,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        """Choose this rank's part; batch sizes count samples.

        Args:
            sources: of the data sets that the mixture still draws from, in any order.
            mixture: its ``fingerprints`` name them.
            micro_batch, global_batch: in samples.
            dp_rank, dp_size: place among the data-parallel ranks.

        Raises:
            UserError: the global batch is no multiple of micro batch times data-parallel size.
            ValueError: an order was made for another number of samples.
        """
        if global_batch % (micro_batch * dp_size):
            raise UserError(
                f"global batch {global_batch} is no multiple of micro batch {micro_batch} x "
                f"data-parallel size {dp_size}: change one of them"
            )
        for source in sources:
            if len(source.order) != len(source.reader):
                raise ValueError(f"the order counts {len(source.order)} samples, the reader {len(source.reader)}")
        by_fingerprint = {source.reader.manifest.fingerprint: source for source in sources}
        self._sources = [by_fingerprint.get(fingerprint) for fingerprint in mixture.fingerprints]
        self._blocks: dict[int, tuple[int, int]] = {}
        self._mixture = mixture
        self.micro_batch = micro_batch
        self.global_batch = global_batch
        self.sequence_length = sources[0].reader.sequence_length
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def stand_in(self, draws: npt.NDArray[np.int64]) -> Rows:
        """Rows of the same shape, all sound and all token 0, for a rank that does not look at tokens."""
        return stand_in(len(draws) // self._dp_size, self.sequence_length)

    def read(self, draws: npt.NDArray[np.int64]) -> Rows:
        """This rank's samples of the step that takes the global ``draws``, in order."""
        slots = len(draws) // self._dp_size
        own = draws[self._dp_rank * slots : (self._dp_rank + 1) * slots]
        numbers, own_draws = self._mixture.locate(own)
        tokens = np.empty((slots, self.sequence_length + 1), dtype=np.int64)
        sound = np.empty(slots, dtype=np.bool_)
        for number in np.unique(numbers):
            source = self._sources[number]
            assert source is not None, "the mixture draws from a data set that has no reader"
            here = numbers == number
            self._expect(int(number), source, int(own_draws[here].max()))
            rows = source.reader.read_rows(source.order.sample_ids(own_draws[here]))
            tokens[here], sound[here] = rows.tokens, rows.sound
        return Rows(tokens, sound)

    def locate(self, draws: npt.NDArray[np.int64]) -> list[tuple[str, int]]:
        """Data set and stored sample of rising global ``draws``, of any rank."""
        found = []
        for number, draw in zip(*self._mixture.locate(draws), strict=True):
            source = self._sources[number]
            assert source is not None, "the mixture draws from a data set that has no reader"
            found.append((source.reader.manifest.name, int(source.order.sample_ids(np.array([draw]))[0])))
        return found

    def _expect(self, number: int, source: Source, draw: int) -> None:
        """Where a data set's next block begins, have the shards of the one after it brought."""
        block = source.order.block_of(draw)
        if not source.reader.manifest.folder.is_local and self._blocks.get(number) != block:
            self._blocks[number] = block
            source.reader.expect(source.order.shards_from(*block))


class ValidationBatches:
    """The same validation samples every time, each on exactly one data-parallel rank."""

    def __init__(self, reader: ShardReader, samples: int, micro_batch: int, dp_rank: int, dp_size: int) -> None:
        """Take the first ``samples`` samples of the reader, all of them when it has fewer.

        Every rank gets the same number of micro batches, as collectives need it; where samples run out, rows that are
        masked wholly fill them up.
        """
        self._reader = reader
        self._samples = min(samples, len(reader))
        self.micro_batch = micro_batch
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    def read(self) -> Rows:
        """This rank's samples, in order; those that fill up count as bad."""
        ids = validation_ids(self._samples, self.micro_batch, self._dp_rank, self._dp_size)
        tokens = np.full((len(ids), self._reader.sequence_length + 1), self._reader.manifest.eod_id, dtype=np.int64)
        sound = ids < self._samples
        rows = self._reader.read_rows(ids[sound])
        tokens[sound] = rows.tokens
        sound[sound] = rows.sound
        return Rows(tokens, sound)


def validation_ids(samples: int, micro_batch: int, dp_rank: int, dp_size: int) -> npt.NDArray[np.int64]:
    """Which of ``samples`` validation samples a rank evaluates, whole micro batches, as many on every rank.

    Ids of ``samples`` and more stand for rows that fill up.
    """
    starts = np.arange(0, samples, micro_batch * dp_size) + dp_rank * micro_batch
    return (starts[:, None] + np.arange(micro_batch)).ravel()


def stand_in(samples: int, sequence_length: int) -> Rows:
    """Rows that are all sound and all token 0, for a rank that does not look at tokens."""
    tokens = np.zeros((samples, sequence_length + 1), dtype=np.int64)
    return Rows(tokens, np.ones(samples, dtype=np.bool_))
