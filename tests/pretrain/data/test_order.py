import hashlib

import numpy as np
import pytest

from pretrain.data import order
from pretrain.data.order import SampleOrder, permutation

SIZES = [5, 1, 17, 8, 8, 30]
SAMPLES = sum(SIZES)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several blocks, the last one incomplete, and shards that lie across their borders.
    monkeypatch.setattr(order, "BLOCK_SAMPLES", 16)


def epoch(sample_order: SampleOrder, number: int) -> list[int]:
    return [sample_order.sample_id(number * SAMPLES + position) for position in range(SAMPLES)]


@pytest.mark.usefixtures("small_blocks")
def test_every_epoch_is_a_permutation_of_its_own() -> None:
    sample_order = SampleOrder(SIZES, seed=3)
    epochs = [epoch(sample_order, number) for number in range(4)]
    for ids in epochs:
        assert sorted(ids) == list(range(SAMPLES))
    assert len({tuple(ids) for ids in epochs}) == 4


@pytest.mark.usefixtures("small_blocks")
def test_seeds_give_other_orders_also_where_numpy_pads_them() -> None:
    orders = {tuple(epoch(SampleOrder(SIZES, seed=seed), 0)) for seed in (-1, 0, 1, 2**32)}
    assert len(orders) == 4


@pytest.mark.usefixtures("small_blocks")
def test_any_draw_is_found_without_those_before_it() -> None:
    walked = [draw for number in range(3) for draw in epoch(SampleOrder(SIZES, seed=7), number)]
    fresh = [SampleOrder(SIZES, seed=7).sample_id(draw) for draw in range(3 * SAMPLES)]
    backwards = SampleOrder(SIZES, seed=7)
    assert fresh == walked
    assert [backwards.sample_id(draw) for draw in reversed(range(3 * SAMPLES))] == walked[::-1]


@pytest.mark.usefixtures("small_blocks")
def test_a_block_holds_neighbouring_shards_only() -> None:
    ends = np.cumsum(SIZES)
    shards = np.searchsorted(ends, epoch(SampleOrder(SIZES, seed=5), 0), side="right")
    for start in range(0, SAMPLES, 16):
        # The permuted shards of 16 neighbouring samples: at most as many as fit when the small ones come together.
        assert len(set(shards[start : start + 16].tolist())) <= 4


def test_one_block_is_permuted_over_all_its_shards() -> None:
    ids = epoch(SampleOrder(SIZES, seed=0), 0)
    assert np.count_nonzero(np.diff(ids) == 1) < SAMPLES // 4


def test_a_permutation_sorts_the_raw_stream_of_its_key() -> None:
    # The definition that runs go on by; 2^17 keys leave ties in the upper 32 bits.
    for size, key in ((1, "a"), (5, "b"), (1 << 17, "c")):
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
        keys = np.random.PCG64(seed).random_raw(size)
        np.testing.assert_array_equal(permutation(size, key), np.argsort(keys, kind="stable"))


def test_the_order_never_changes_between_releases() -> None:
    # Written down once: a run that is resumed with a newer program must go on in the order in which it began.
    assert [SampleOrder([4, 4, 4], seed=1).sample_id(draw) for draw in range(12)] == [
        0,
        1,
        7,
        10,
        4,
        6,
        2,
        3,
        11,
        5,
        8,
        9,
    ]


def test_a_billion_samples_cost_one_block() -> None:
    sample_order = SampleOrder([32768] * 30518, seed=0)
    ids = {sample_order.sample_id(draw) for draw in range(900_000_000, 900_000_064)}
    assert len(ids) == 64
    assert all(0 <= sample_id < len(sample_order) for sample_id in ids)
