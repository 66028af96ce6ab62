"""Which shards are read together, and what they need of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """What one block of the sample order can touch at most, whichever way its shards are permuted.

    Attributes:
        shards: so many.
        cache_bytes: of the files of this block and the next, which is fetched meanwhile.
    """

    shards: int
    cache_bytes: int


def window(samples: Sequence[int], file_bytes: Sequence[int], block_samples: int) -> Window:
    """The window of blocks of ``block_samples`` over shards that hold ``samples`` and take ``file_bytes``."""
    ends = np.cumsum(np.sort(np.asarray(samples)))
    # The smallest shards that fit between a first and a last one of which the block takes one sample each.
    between = int(np.searchsorted(ends, max(0, block_samples - 2), side="right"))
    shards = min(len(samples), between + 2)
    largest = np.sort(np.asarray(file_bytes))[::-1]
    return Window(shards, int(largest[: 2 * shards].sum()))
