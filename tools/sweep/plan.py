"""Which state each run is in, given the results: what is kept, what is left, what waits for what."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pretrain.data.manifest import Manifest
from tools.sweep.data import samples_identity
from tools.sweep.grid import PLACES, Grid, Run, Settings, flat
from tools.sweep.results import Result


class State(StrEnum):
    """What there is of a run.

    ``failed`` and ``changed`` runs have a result that does not count and are run again. A ``waiting`` run takes a
    setting from runs that have no result yet; a ``blocked`` one from runs that all diverged.
    """

    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"
    CHANGED = "changed"
    TO_RUN = "to run"
    WAITING = "waiting"
    BLOCKED = "blocked"


COUNTED = (State.FINISHED, State.DIVERGED)
RUNNABLE = (State.TO_RUN, State.CHANGED, State.FAILED)


@dataclass(frozen=True)
class Planned:
    """A run and what is known of it.

    Attributes:
        taken: setting -> value from another stage; empty while that is not known.
        detail: what differs, failed or is waited for; empty for the other states.
        result: the recorded one, whether it counts or not.
    """

    run: Run
    state: State
    detail: str
    taken: Settings
    result: Result | None

    @property
    def counts(self) -> bool:
        """Whether the result is one of the grid as it is now."""
        return self.state in COUNTED


def plan(grid: Grid, results: Mapping[str, Result], data: Manifest | None) -> list[Planned]:
    """The state of every run in the grid's order; without ``data`` the data of the results is not compared."""
    planned: list[Planned] = []
    for run in grid.runs:
        planned.append(_plan_run(grid, run, results.get(run.id), data, planned))
    return planned


def all_settings(grid: Grid, run: Run, taken: Settings) -> Settings:
    """Every setting of a run by its dotted name, but for the places."""
    settings = flat(grid.config(run, taken).model_dump(mode="json"))
    return {name: value for name, value in settings.items() if name not in PLACES}


def _plan_run(grid: Grid, run: Run, result: Result | None, data: Manifest | None, before: list[Planned]) -> Planned:
    taken: Settings = {}
    for setting, stage in run.take.items():
        sources = [other for other in before if (other.run.stage, other.run.variant) == (stage, run.variant)]
        if missing := [other for other in sources if not other.counts]:
            detail = f"for {len(missing)} of {len(sources)} runs of {stage}/{run.variant}"
            return Planned(run, State.WAITING, detail, {}, result)
        best = best_of(sources)
        if best is None:
            return Planned(run, State.BLOCKED, f"every run of {stage}/{run.variant} diverged", {}, result)
        taken[setting] = best.run.varied[setting]
    if result is None:
        return Planned(run, State.TO_RUN, "", taken, None)
    if differences := _differences(grid, run, taken, result, data):
        return Planned(run, State.CHANGED, "; ".join(differences), taken, result)
    return Planned(run, State(result.status), result.reason or "", taken, result)


def best_of(candidates: list[Planned]) -> Planned | None:
    """The one with the lowest final validation loss among those that count and did not diverge."""
    finished = [
        (planned.result.final_loss, planned)
        for planned in candidates
        if planned.state == State.FINISHED and planned.result and planned.result.final_loss is not None
    ]
    return min(finished, key=lambda pair: pair[0])[1] if finished else None


def _differences(grid: Grid, run: Run, taken: Settings, result: Result, data: Manifest | None) -> list[str]:
    """How the recorded run is not the one that the grid describes now."""
    now, then = all_settings(grid, run, taken), result.settings
    given = grid.explicit_settings(run)
    # A default that the record does not know is newer than it, and changes nothing.
    names = [name for name in (*now, *(set(then) - set(now))) if name in then or name in given]
    found = [
        f"{name}: {then.get(name, 'not recorded')} -> {now.get(name, 'no setting any more')}"
        for name in names
        if name not in then or name not in now or then[name] != now[name]
    ]
    if data and (identity := samples_identity(data)) != result.data:
        found.append(f"data: {result.data[:12]} -> {identity[:12]}")
    return found
