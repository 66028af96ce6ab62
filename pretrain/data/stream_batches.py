"""Batches out of raw text, for training and for validation."""

import numpy as np
import numpy.typing as npt

from pretrain.data.batches import stand_in, validation_ids
from pretrain.data.cursor import Cursor
from pretrain.data.reader import Rows
from pretrain.data.stream import Packer, TextReader, TextShards, endless
from pretrain.errors import UserError


class StreamBatches:
    """Steps of one data-parallel rank; they can only be read one after the other.

    Attributes:
        micro_batch, global_batch: in samples; a step may take a smaller batch.
        sequence_length: of a sample.
    """

    def __init__(
        self,
        shards: TextShards,
        seed: int,
        sequence_length: int,
        micro_batch: int,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int,
        start: Cursor,
    ) -> None:
        """Go on behind ``consumed_samples`` of all ranks together, where ``start`` says."""
        self.micro_batch = micro_batch
        self.global_batch = global_batch
        self.sequence_length = sequence_length
        self._dp_size = dp_size
        documents = endless(shards, seed, dp_rank, dp_size, start)
        self._packer = Packer(documents, sequence_length, start.token)
        self._next_draw = consumed_samples
        # Steps are read ahead of their use; a checkpoint holds where those that were used end.
        self._cursors = {consumed_samples: start}

    def read(self, draws: npt.NDArray[np.int64]) -> Rows:
        """This rank's samples of the next step; UserError when other draws than that step's are asked for."""
        first, last = int(draws[0]), int(draws[-1])
        if first != self._next_draw or last != first + len(draws) - 1:
            raise UserError(
                f"draws {first} to {last} do not follow {self._next_draw - 1}: data.mode=stream cannot skip windows of "
                "samples, since it reads its shards in one pass; build shards for that (python -m tools.shards build)"
            )
        tokens = self._packer.samples(len(draws) // self._dp_size)
        self._next_draw = last + 1
        self._cursors[self._next_draw] = self._packer.cursor
        return Rows(tokens, np.ones(len(tokens), dtype=np.bool_))

    def stand_in(self, draws: npt.NDArray[np.int64]) -> Rows:
        """Rows of the same shape, all sound and all token 0, for a rank that does not look at tokens."""
        return stand_in(len(draws) // self._dp_size, self.sequence_length)

    def locate(self, draws: npt.NDArray[np.int64]) -> list[tuple[str, int]]:
        """Nothing is stored as a sample."""
        return []

    def cursor_behind(self, consumed_samples: int) -> Cursor | None:
        """Where this rank's samples begin that follow those; None on a rank that does not read.

        The places before are forgotten.
        """
        cursor = self._cursors.get(consumed_samples)
        for past in [count for count in list(self._cursors) if count < consumed_samples]:
            del self._cursors[past]
        return cursor


def read_held_out(
    shards: TextShards,
    samples: int,
    sequence_length: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
) -> Rows:
    """This rank's part of the first ``samples`` samples of held-out shards, as they are listed.

    Every rank packs the same samples, so that they do not depend on the number of ranks; those that fill up the micro
    batches count as bad.

    Raises:
        UserError: the shards cannot be read, or hold not even one sample.
    """
    documents = TextReader(shards).documents(shards.places, Cursor())
    packed = Packer(documents, sequence_length).samples(samples)
    if not len(packed):
        raise UserError(
            f"data.validation_urls hold fewer than the {sequence_length + 1} tokens of one sample; name more shards or "
            "set validation.every=0"
        )
    ids = validation_ids(len(packed), micro_batch, dp_rank, dp_size)
    sound = ids < len(packed)
    tokens = np.full((len(ids), sequence_length + 1), shards.tokenizer.eod_id, dtype=np.int64)
    tokens[sound] = packed[ids[sound]]
    return Rows(tokens, sound)
