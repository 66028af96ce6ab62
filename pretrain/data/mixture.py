"""Several data sets as one sequence: a pure function from the global draw to (data set, its own draw).

A run's sequence is cut into stages. A stage has weights; within it, each block of 4096 draws takes its share of every
data set, rounded so that the totals never drift, and is shuffled by (seed, block). A data set that reaches its largest
number of epochs ends a segment: from the next draw on the others share its part. Stages are stored, segments follow
from them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pretrain.data.order import permutation

BLOCK_DRAWS = 4096


@dataclass(frozen=True)
class Share:
    """One data set's part of a stage.

    Attributes:
        fingerprint: of its manifest, hex.
        order: name of its orders (see :class:`pretrain.data.order.SampleOrder`).
        samples: of one epoch.
        weight: its samples are weight over the sum of weights of all; 0 keeps its place for a later stage.
        max_epochs: epochs over the whole run after which it leaves; None for no end.
        first: samples of it drawn before the stage.
    """

    fingerprint: str
    order: str
    samples: int
    weight: float
    max_epochs: int | None
    first: int

    @property
    def left(self) -> int | None:
        """Samples that its largest number of epochs leaves for the stage; None without end."""
        return None if self.max_epochs is None else max(0, self.max_epochs * self.samples - self.first)


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with the same weights.

    Attributes:
        start: global draw at which it begins.
        shares: of all data sets that the run has met.
    """

    start: int
    shares: tuple[Share, ...]


class Mixture:
    """Global draw -> (data set, draw within it), by (seed, stages) alone.

    Attributes:
        fingerprints: of the data sets, which are numbered by their place in it.
        orders: fingerprint -> name of the data set's orders.
        end: global draw at which every data set has reached its largest number of epochs; None if that never happens.
    """

    def __init__(self, stages: Sequence[Stage], seed: int) -> None:
        """Lay out the segments; the stages' starts must not fall."""
        self.orders = {share.fingerprint: share.order for stage in stages for share in stage.shares}
        self.fingerprints = tuple(self.orders)
        self.end: int | None = None
        self._segments: list[_Segment] = []
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            self.end = stage.start
            for segment in _segments(stage, seed):
                if following and segment.start >= following.start:
                    break
                self._segments.append(segment)
                self.end = segment.end
        self._starts = [segment.start for segment in self._segments]
        self._block = lru_cache(maxsize=4)(self._number_block)

    def locate(self, draws: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of the data set and draw within it, int64 ``[n]`` each, of rising global draws.

        Raises:
            IndexError: a draw lies beyond the end.
        """
        if len(draws) and self.end is not None and draws[-1] >= self.end:
            raise IndexError(f"draw {draws[-1]} of {self.end}")
        numbers, own_draws = np.empty(len(draws), dtype=np.int64), np.empty(len(draws), dtype=np.int64)
        done = 0
        while done < len(draws):
            place = bisect_right(self._starts, int(draws[done])) - 1
            segment = self._segments[place]
            block, _ = divmod(int(draws[done]) - segment.start, BLOCK_DRAWS)
            start = segment.start + block * BLOCK_DRAWS
            following = self._starts[place + 1] if place + 1 < len(self._starts) else start + BLOCK_DRAWS
            stop = int(np.searchsorted(draws, min(start + BLOCK_DRAWS, following)))
            chosen, own = self._block(place, block)
            within = draws[done:stop] - start
            numbers[done:stop], own_draws[done:stop] = chosen[within], own[within]
            done = stop
        return numbers, own_draws

    def drawn(self, draw: int) -> dict[str, int]:
        """Fingerprint -> samples of that data set among the global draws before ``draw``."""
        counts: dict[str, int] = {}
        for segment, following in zip(self._segments, [*self._starts[1:], draw], strict=True):
            if segment.start < draw:
                counts |= segment.drawn(min(draw, following))
        return counts

    def _number_block(self, place: int, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        segment = self._segments[place]
        chosen, own = segment.block(block)
        numbers = np.array([self.fingerprints.index(share.fingerprint) for share in segment.shares], dtype=np.int64)
        return numbers[chosen], own


def next_stage(stages: Sequence[Stage], seed: int, draw: int, shares: Sequence[Share]) -> Stage:
    """The stage that begins at ``draw`` with the weights of ``shares``.

    Every data set goes on where the stages before left it. One that ``shares`` does not name stays with weight 0.
    """
    drawn = Mixture(stages, seed).drawn(draw) if stages else {}
    before = {share.fingerprint: share for stage in stages for share in stage.shares}
    kept = {name: replace(share, first=drawn.get(name, share.first)) for name, share in before.items()}
    now = {
        share.fingerprint: replace(share, first=kept[share.fingerprint].first, order=kept[share.fingerprint].order)
        if share.fingerprint in kept
        else share
        for share in shares
    }
    gone = [replace(share, weight=0.0) for name, share in kept.items() if name not in now]
    return Stage(draw, (*now.values(), *gone))


def normalized(shares: Sequence[Share]) -> Mapping[str, tuple[Fraction, int | None]]:
    """Fingerprint -> exact part of the samples and largest number of epochs, of the data sets that take part."""
    total = sum((Fraction(share.weight) for share in shares), Fraction())
    return {share.fingerprint: (Fraction(share.weight) / total, share.max_epochs) for share in shares if share.weight}


def quotas(weights: Sequence[int], draws: int) -> list[int]:
    """How many of the first ``draws`` each data set gets; weights are positive and do not rise.

    Each takes its rounded part of what those before it left. So every quota rises by at most 1 with each draw and
    never falls, which rounding the cumulative weights does not promise, and is within about 1 of its ideal.
    """
    left, rest, counts = draws, sum(weights), []
    for weight in weights:
        counts.append((2 * left * weight + rest) // (2 * rest))
        left -= counts[-1]
        rest -= weight
    return counts


class _Segment:
    """Draws [start, end) over data sets none of which ends before."""

    def __init__(self, start: int, shares: Sequence[Share], seed: int) -> None:
        self.start = start
        self.shares = sorted(shares, key=lambda share: (-share.weight, share.fingerprint))
        self._key = f"mixture/{seed}/{start}"
        exact = [Fraction(share.weight) for share in self.shares]
        scale = max(weight.denominator for weight in exact)  # powers of two, so the largest is a multiple of all
        self._weights = [int(weight * scale) for weight in exact]
        self.end = min((self._end_of(place) for place, share in enumerate(self.shares) if share.left), default=None)

    def block(self, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Place in ``shares`` and draw within the data set, int64 ``[4096]`` each, of a block's draws."""
        before = quotas(self._weights, block * BLOCK_DRAWS)
        after = quotas(self._weights, (block + 1) * BLOCK_DRAWS)
        counts = np.subtract(after, before)
        chosen = np.repeat(np.arange(len(counts)), counts)[permutation(BLOCK_DRAWS, f"{self._key}/{block}")]
        own = np.empty(BLOCK_DRAWS, dtype=np.int64)
        for place, share in enumerate(self.shares):
            own[chosen == place] = share.first + before[place] + np.arange(counts[place])
        return chosen, own

    def drawn(self, draw: int) -> dict[str, int]:
        """Fingerprint -> samples drawn of it, from the run's begin to the global draw or this segment's end."""
        stop = draw if self.end is None else min(draw, self.end)
        block, within = divmod(stop - self.start, BLOCK_DRAWS)
        before = quotas(self._weights, block * BLOCK_DRAWS)
        counts = np.bincount(self.block(block)[0][:within], minlength=len(before))
        return {
            share.fingerprint: share.first + quota + int(count)
            for share, quota, count in zip(self.shares, before, counts, strict=True)
        }

    def _end_of(self, place: int) -> int:
        """The global draw behind the one that takes the last sample of a limited data set."""
        left = self.shares[place].left
        assert left is not None

        def total(block: int) -> int:
            return quotas(self._weights, block * BLOCK_DRAWS)[place]

        high = 1
        while total(high) < left:
            high *= 2
        block = bisect_left(range(high + 1), left, key=total) - 1
        own = self.block(block)
        last = self.shares[place].first + left - 1
        within = int(np.flatnonzero((own[0] == place) & (own[1] == last))[0])
        return self.start + block * BLOCK_DRAWS + within + 1


def _segments(stage: Stage, seed: int) -> Iterator[_Segment]:
    """The segments of a stage; none follows one without end."""
    shares, start = [share for share in stage.shares if share.weight], stage.start
    while shares := [share for share in shares if share.left != 0]:
        segment = _Segment(start, shares, seed)
        yield segment
        if segment.end is None:
            return
        drawn = segment.drawn(segment.end)
        shares = [replace(share, first=drawn[share.fingerprint]) for share in shares]
        start = segment.end
