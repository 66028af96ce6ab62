from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from pretrain.data.mixture import BLOCK_DRAWS, Mixture, Share, Stage, next_stage, normalized, quotas

SEED = 5
WEIGHTS = [0.153, 0.047, 0.8]


def share(name: str, weight: float = 1.0, samples: int = 1000, max_epochs: int | None = None) -> Share:
    return Share(name, name, samples, weight, max_epochs, 0)


def of(weights: Sequence[float]) -> Mixture:
    return Mixture([Stage(0, tuple(share(f"d{place}", weight) for place, weight in enumerate(weights)))], SEED)


def walk(mixture: Mixture, start: int, stop: int) -> list[tuple[str, int]]:
    numbers, own = mixture.locate(np.arange(start, stop))
    return [(mixture.fingerprints[number], draw) for number, draw in zip(numbers.tolist(), own.tolist(), strict=True)]


def test_every_data_set_is_read_in_order_and_counts_stay_near_their_ideal() -> None:
    draws = walk(of(WEIGHTS), 0, 200_000)
    for place, weight in enumerate(WEIGHTS):
        own = [draw for name, draw in draws if name == f"d{place}"]
        assert own == list(range(len(own)))
        assert abs(len(own) - weight * 200_000) <= 8


def test_counts_are_exact_at_every_border_of_a_block() -> None:
    numbers, _ = of(WEIGHTS).locate(np.arange(48 * BLOCK_DRAWS))
    counts = np.zeros(3)
    for block, chosen in enumerate(numbers.reshape(-1, BLOCK_DRAWS), start=1):
        counts += np.bincount(chosen, minlength=3)
        assert np.abs(counts - np.array(WEIGHTS) * block * BLOCK_DRAWS).max() <= 1


@pytest.mark.parametrize(
    "weights",
    [WEIGHTS, [1e-6, 1.0], [1.0], [1 / 3] * 3, list(np.random.default_rng(0).dirichlet(np.full(40, 0.3)) + 1e-7)],
)
def test_quotas_never_fall_and_add_up(weights: list[float]) -> None:
    ordered = sorted((int(Fraction(weight) * 2**80) for weight in weights), reverse=True)
    before = quotas(ordered, 0)
    assert not any(before)
    for draws in (*range(1, 300), *range(10**12, 10**12 + 200)):
        now = quotas(ordered, draws)
        assert sum(now) == draws
        ideal = [Fraction(draws * weight, sum(ordered)) for weight in ordered]
        assert max(abs(count - part) for count, part in zip(now, ideal, strict=True)) <= 2
        if draws != 10**12:
            assert all(0 <= after - earlier <= 1 for earlier, after in zip(before, now, strict=True))
        before = now


def test_any_draw_is_found_without_those_before_it() -> None:
    walked = walk(of(WEIGHTS), 0, 3 * BLOCK_DRAWS)
    for start, stop in [(0, 1), (4095, 4097), (8000, 8500), (4096, 8192), (12287, 12288)]:
        assert walk(of(WEIGHTS), start, stop) == walked[start:stop]
    gaps = np.array([3, 4095, 4096, 9000, 12287])
    numbers, own = of(WEIGHTS).locate(gaps)
    assert [(f"d{number}", draw) for number, draw in zip(numbers, own, strict=True)] == [walked[gap] for gap in gaps]


def test_blocks_are_shuffled_each_in_its_way_and_by_the_seed() -> None:
    half = Stage(0, (share("a"), share("b")))
    orders = [
        tuple(Mixture([half], seed).locate(np.arange(block * BLOCK_DRAWS, (block + 1) * BLOCK_DRAWS))[0].tolist())
        for seed in (1, 2)
        for block in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert max(Counter(orders[0][:100]).values()) < 75


def test_the_listing_does_not_matter() -> None:
    one = Mixture([Stage(0, (share("a", 1.0), share("b", 2.0), share("c", 1.0)))], SEED)
    other = Mixture([Stage(0, (share("c", 1.0), share("a", 1.0), share("b", 2.0)))], SEED)
    assert walk(one, 0, 9000) == walk(other, 0, 9000)


def test_the_mixture_never_changes_between_releases() -> None:
    # Written down once, as in the order of a data set.
    draws = walk(Mixture([Stage(0, (share("a", 3.0), share("b", 2.0)))], 1), 4084, 4108)
    assert "".join(name for name, _ in draws) == "baabaaaabbaabaaabaaabaaa"
    assert (draws[0], draws[-1]) == (("b", 1634), ("a", 2466))


def test_a_data_set_leaves_after_its_last_epoch() -> None:
    stage = Stage(0, (share("a", 1.0), share("small", 1.0, samples=700, max_epochs=3), share("b", 2.0)))
    mixture = Mixture([stage], SEED)
    assert mixture.end is None
    draws = walk(mixture, 0, 30_000)
    last = max(place for place, (name, _) in enumerate(draws) if name == "small")
    assert abs(last - 4 * 2100) < 300
    for name in ("a", "b", "small"):
        own = [draw for other, draw in draws if other == name]
        assert own == list(range(len(own)))
        assert name != "small" or len(own) == 2100
    rest = Counter(name for name, _ in draws[last + 1 :])
    assert rest["b"] / rest["a"] == pytest.approx(2, abs=0.02)
    assert walk(Mixture([stage], SEED), last - 5, last + 5) == draws[last - 5 : last + 5]


def test_a_mixture_ends_when_all_have_left() -> None:
    mixture = Mixture(
        [Stage(0, (share("a", 3.0, samples=5000, max_epochs=2), share("b", 1.0, samples=700, max_epochs=1)))], SEED
    )
    assert mixture.end == 10_700
    counts = Counter(walk(mixture, 0, 10_700))
    assert max(counts.values()) == 1
    assert Counter(name for name, _ in counts) == {"a": 10_000, "b": 700}
    with pytest.raises(IndexError, match="draw 10700 of 10700"):
        walk(mixture, 10_690, 10_701)


def test_a_new_stage_goes_on_with_each_data_set_where_it_stood() -> None:
    stages = [next_stage([], SEED, 0, [share("a", 1.0), share("b", 1.0)])]
    stages.append(next_stage(stages, SEED, 5001, [share("a", 1.0), share("c", 3.0)]))
    stages.append(next_stage(stages, SEED, 9999, [share("b", 1.0), share("c", 1.0)]))
    draws = walk(Mixture(stages, SEED), 0, 20_000)
    assert draws[:5001] == walk(Mixture(stages[:1], SEED), 0, 5001)
    assert draws[:9999] == walk(Mixture(stages[:2], SEED), 0, 9999)
    for name in "abc":
        own = [draw for other, draw in draws if other == name]
        assert own == list(range(len(own)))
    middle = Counter(name for name, _ in draws[5001:9999])
    assert middle["b"] == 0
    assert middle["c"] / middle["a"] == pytest.approx(3, abs=0.2)
    assert {name for name, _ in draws[9999:]} == {"b", "c"}
    assert [len(stage.shares) for stage in stages] == [2, 3, 3]


def test_epochs_count_over_stages() -> None:
    limited = share("a", samples=1000, max_epochs=2)
    stages = [next_stage([], SEED, 0, [limited, share("b")])]
    stages.append(next_stage(stages, SEED, 3000, [replace(limited, weight=5.0), share("b")]))
    own = [draw for name, draw in walk(Mixture(stages, SEED), 0, 8000) if name == "a"]
    assert own == list(range(2000))
    stages.append(next_stage(stages, SEED, 6000, [replace(limited, max_epochs=3), share("b")]))
    own = [draw for name, draw in walk(Mixture(stages, SEED), 0, 12_000) if name == "a"]
    assert own == list(range(3000))


def test_a_stage_that_nothing_was_drawn_from_counts_for_nothing() -> None:
    first = next_stage([], SEED, 0, [share("a")])
    unused = next_stage([first], SEED, 100, [share("b")])
    last = next_stage([first, unused], SEED, 100, [share("a"), share("c")])
    draws = walk(Mixture([first, unused, last], SEED), 0, 1000)
    assert draws[:100] == [("a", draw) for draw in range(100)]
    assert {name for name, _ in draws[100:]} == {"a", "c"}
    assert min(draw for name, draw in draws[100:] if name == "a") == 100


def test_a_data_set_keeps_its_orders_through_stages() -> None:
    alone = replace(share("a"), order="")
    stages = [next_stage([], SEED, 0, [alone])]
    stages.append(next_stage(stages, SEED, 10, [share("a"), share("b")]))
    assert Mixture(stages, SEED).orders == {"a": "", "b": "b"}


def test_weights_compare_by_their_parts() -> None:
    assert normalized([share("a", 1.0), share("b", 2.0)]) == normalized([share("b", 4.0), share("a", 2.0)])
    assert normalized([share("a", 1.0), share("b", 0.0)]) == normalized([share("a", 7.0)])
    assert normalized([share("a", 1.0), share("b", 2.0)]) != normalized([share("a", 1.0), share("b", 2.1)])
    assert normalized([share("a", max_epochs=1)]) != normalized([share("a")])


def test_a_late_draw_costs_its_block_only() -> None:
    big = Stage(0, (share("a", 0.3, samples=10**9), share("b", 0.7, samples=10**8, max_epochs=10**6)))
    numbers, own = Mixture([big], SEED).locate(np.arange(10**12, 10**12 + 512))
    for number, weight in ((0, 0.3), (1, 0.7)):
        assert own[numbers == number][0] == pytest.approx(weight * 10**12, abs=BLOCK_DRAWS)
