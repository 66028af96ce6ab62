"""The order of a data set's samples: a pure function from the number of a draw to a sample.

Every epoch visits each sample once, in its own order: the shards are permuted, the samples then lie in that order on
a line, which is cut into blocks of 2^18, and each block is permuted. So one block's permutation is all that is ever
computed or kept, reads stay within few shards at a time, and any draw can be looked up at once: a resume costs nothing.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

BLOCK_SAMPLES = 1 << 18


class SampleOrder:
    """Draw number of a data set -> sample, by (seed, name, shard sizes) alone."""

    def __init__(self, shard_sizes: Sequence[int], seed: int, name: str = "") -> None:
        """Prepare the order.

        Args:
            shard_sizes: samples per shard; sample ids count through the shards as listed.
            seed: of the run.
            name: tells data sets of one run apart, so that two of the same sizes do not share their orders.
        """
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._samples = int(self._sizes.sum())
        self._key = f"{seed}/{name}" if name else f"{seed}"
        # A step near an epoch's or a block's end reaches into the next one; both stay at hand.
        self._shards_of_epoch = lru_cache(maxsize=2)(self._permute_shards)
        self._block_of_epoch = lru_cache(maxsize=2)(self._permute_block)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._samples

    def sample_id(self, draw: int) -> int:
        """The sample of a draw number >= 0; draws beyond the first epoch begin the next."""
        return int(self.sample_ids(np.array([draw]))[0])

    def sample_ids(self, draws: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of many draws, int64 ``[n]``; cheap where the draws lie near one another."""
        epochs, positions = np.divmod(draws, self._samples)
        blocks, within = np.divmod(positions, BLOCK_SAMPLES)
        ids = np.empty(len(draws), dtype=np.int64)
        for epoch, block in sorted(set(zip(epochs.tolist(), blocks.tolist(), strict=True))):
            here = (epochs == epoch) & (blocks == block)
            line = block * BLOCK_SAMPLES + self._block_of_epoch(epoch, block)[within[here]]
            shards, ends = self._shards_of_epoch(epoch)
            place = np.searchsorted(ends, line, side="right")
            shard = shards[place]
            ids[here] = self._starts[shard] + self._sizes[shard] + line - ends[place]
        return ids

    def block_of(self, draw: int) -> tuple[int, int]:
        """Epoch and block of a draw."""
        epoch, position = divmod(draw, self._samples)
        return epoch, position // BLOCK_SAMPLES

    def shards_from(self, epoch: int, block: int) -> list[int]:
        """The shards that a block and the one after it lie in, in the order of their need."""
        following = (epoch, block + 1) if (block + 1) * BLOCK_SAMPLES < self._samples else (epoch + 1, 0)
        return list(dict.fromkeys(self._shards_of_block(epoch, block) + self._shards_of_block(*following)))

    def _shards_of_block(self, epoch: int, block: int) -> list[int]:
        shards, ends = self._shards_of_epoch(epoch)
        line = block * BLOCK_SAMPLES, min((block + 1) * BLOCK_SAMPLES, self._samples) - 1
        first, last = np.searchsorted(ends, line, side="right")
        part: list[int] = shards[first : last + 1].tolist()
        return part

    def _permute_shards(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """An epoch's order of shards, and where each ends on the epoch's line of samples."""
        shards = permutation(len(self._sizes), f"shards/{self._key}/{epoch}")
        return shards, np.cumsum(self._sizes[shards])

    def _permute_block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        size = min(BLOCK_SAMPLES, self._samples - block * BLOCK_SAMPLES)
        return permutation(size, f"block/{self._key}/{epoch}/{block}")


def permutation(size: int, key: str) -> npt.NDArray[np.int64]:
    """A permutation of ``range(size)`` that is the same for a key on every machine and in every release of numpy.

    Only the raw stream of a bit generator is promised never to change (numpy NEP 19), ``Generator.permutation`` is not.
    A hashed key keeps streams apart that a SeedSequence of the numbers would not: it pads, so [1] and [1, 0] are one.
    """
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
    return _argsort(np.random.PCG64(seed).random_raw(size))


def _argsort(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """``np.argsort(keys, kind="stable")``, several times faster for random keys.

    numpy sorts 16 bits by radix, 64 by comparison: two radix passes over the upper 32 bits leave next to nothing to
    the comparison, which is quick where keys are sorted already.
    """
    places = np.argsort((keys >> np.uint64(32)).astype(np.uint16), kind="stable")
    places = places[np.argsort((keys >> np.uint64(48)).astype(np.uint16)[places], kind="stable")]
    return places[np.argsort(keys[places], kind="stable")]
