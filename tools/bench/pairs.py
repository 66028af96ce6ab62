"""Timings of several contenders in interleaved rounds.

Other work on the machine, heat and clocks change over a run. Contenders that take turns (A, B, C, A, B, C, ...) meet
the same changes, and a ratio is taken within each round before the median over the rounds.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BUSY_SHARE = 0.8
"""Share of the threads' time below which timings on a CPU are doubtful."""

Turn = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One turn: seconds on the clock, and seconds of computing meanwhile, by the clock that was chosen."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Spread:
    """Several values in short: quartiles resist single disturbed rounds, the extremes show them."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float


Rounds = dict[str, list[Timing]]
"""Contender -> its turn of every round."""


def wall(timing: Timing) -> float:
    """Seconds on the clock."""
    return timing.wall


def cpu(timing: Timing) -> float:
    """Seconds of computing, which others' work on the machine disturbs less."""
    return timing.cpu


def interleave(
    contenders: Mapping[str, Turn],
    rounds: int,
    synchronize: Callable[[], object] = lambda: None,
    prepare: Callable[[], object] = lambda: None,
    clocks: Mapping[str, Callable[[], float]] | None = None,
    *,
    rehearse: bool = False,
) -> Rounds:
    """Let every contender take one turn in each of ``rounds`` rounds, always in the same order.

    Args:
        contenders: warmed up already: the first turns of anything are slow.
        synchronize: waits for work that a turn left running on a device.
        prepare: called before each turn and not timed.
        clocks: seconds of computing, by contender; all threads of this process are counted where none is given.
        rehearse: let each turn follow one of the same contender that is not timed, so that short turns find caches
            and heap as they themselves leave them, and not as another contender does.
    """
    timings: Rounds = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, turn in contenders.items():
            prepare()
            if rehearse:
                turn()
            cpu_clock = (clocks or {}).get(name, time.process_time)
            synchronize()
            computed, clock = cpu_clock(), time.perf_counter()
            turn()
            synchronize()
            timings[name].append(Timing(time.perf_counter() - clock, cpu_clock() - computed))
    return timings


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles and extremes of at least one value."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(min(values), lower, median, upper, max(values))


def ratio(timings: Rounds, name: str, peer: str, seconds: Callable[[Timing], float] = wall) -> Spread:
    """Time of ``name`` over that of ``peer`` in the same round; above 1 the peer is faster."""
    return spread(ratios(timings, name, peer, seconds))


def ratios(timings: Rounds, name: str, peer: str, seconds: Callable[[Timing], float] = wall) -> list[float]:
    """Of every round, see :func:`ratio`."""
    return [seconds(mine) / seconds(theirs) for mine, theirs in zip(timings[name], timings[peer], strict=True)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which the true median lies with 95 % probability, whatever the distribution; the extremes of few values.

    The k-th smallest and k-th largest, for the largest k that a binomial distribution of n halves allows.
    """
    ordered, below, k = sorted(values), 0.0, 0
    while k < len(ordered) // 2:
        below += math.comb(len(ordered), k) / 2 ** len(ordered)
        if below > 0.025:
            break
        k += 1
    return ordered[max(k - 1, 0)], ordered[-max(k, 1)]


def cores_given(timings: Sequence[Timing]) -> float:
    """Median over the turns of CPU time over wall time.

    Well below the number of threads, the machine was busy with something else, or the work is not parallel; on a GPU
    it only tells how busy the thread is that launches the work.
    """
    return statistics.median(timing.cpu / timing.wall for timing in timings)


def doubt(timings: Rounds, threads: int) -> str:
    """A warning, on lines of its own, if the threads of this process did not compute most of the time; else nothing."""
    given = cores_given([timing for turns in timings.values() for timing in turns])
    if given >= BUSY_SHARE * threads:
        return ""
    return (
        f"\n\nDo not trust these figures: the process computed on {given:.2f} of {threads} cores. The machine was busy "
        f"with something else, or the work is too small for so many threads (see --threads)."
    )
