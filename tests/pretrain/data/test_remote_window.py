"""What a block of samples can touch, against all blocks of all orders of small data sets."""

import itertools
import random

import numpy as np
import pytest

from pretrain.data.window import window


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 13, 100])
def test_the_window_holds_whatever_a_block_touches(block: int) -> None:
    random_numbers = random.Random(block)
    for _ in range(40):
        count = random_numbers.randint(1, 5)
        samples = [random_numbers.randint(1, 6) for _ in range(count)]
        sizes = [random_numbers.randint(1, 100) for _ in range(count)]
        found = window(samples, sizes, block)
        touched = [
            parts for order in itertools.permutations(range(count)) for parts in blocks_of(order, samples, block)
        ]
        assert max(map(len, touched)) <= found.shards <= min(count, max(map(len, touched)) + 1)
        assert max(sum(sizes[shard] for shard in parts) for parts in touched) <= found.cache_bytes <= sum(sizes)


def blocks_of(order: tuple[int, ...], samples: list[int], block: int) -> list[set[int]]:
    """The shards that each block of a line of samples lies in."""
    line = np.repeat(order, [samples[shard] for shard in order])
    return [set(line[start : start + block].tolist()) for start in range(0, len(line), block)]


def test_two_blocks_fit() -> None:
    # 10 shards of 4 samples; a block of 8 can begin and end inside shards.
    assert window([4] * 10, [7] * 10, 8).shards == 3
    assert window([4] * 10, [7] * 10, 8).cache_bytes == 6 * 7
