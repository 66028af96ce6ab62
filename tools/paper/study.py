"""What the TensorBoard files of a sweep tell of angles over depth and of spikes, as Markdown."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.sweep.curves import read_curves
from tools.sweep.grid import SEED, Grid, Run
from tools.sweep.results import read_results

SUBLAYERS = ("attention", "mlp")
_WINDOW = 64
_SPIKE = 7.0
_MEAN = 8
_MAD = 1.4826  # of a normal distribution: standard deviation over median absolute deviation


@dataclass(frozen=True)
class Slope:
    """Angles over depth at one step: angle(k) ~ k ** exponent.

    Attributes:
        step: of the run.
        exponent: least squares of log angle over log k, all layers k.
        inner: the same without the first and the last layer; nan with fewer than four layers.
        ratio: largest over smallest of angle(k) * sqrt(k), 1 where it falls exactly like 1/sqrt(k).
    """

    step: int
    exponent: float
    inner: float
    ratio: float


def slope(step: int, angles: Sequence[float]) -> Slope:
    """Of the mean angles of layers 1, 2, ... in radians."""
    layers, values = np.arange(1, len(angles) + 1), np.array(angles)
    scaled = values * np.sqrt(layers)
    inner = _exponent(layers[1:-1], values[1:-1]) if len(angles) > 3 else math.nan
    return Slope(step, _exponent(layers, values), inner, float(scaled.max() / scaled.min()))


def _exponent(layers: np.ndarray, values: np.ndarray) -> float:
    return float(np.polyfit(np.log(layers), np.log(values), 1)[0])


def spikes(losses: Mapping[int, float]) -> list[int]:
    """Steps whose training loss is above the median of the 64 before by more than 7 robust deviations, or no number.

    The deviation is 1.4826 times the median absolute one; spikes do not enter later medians.
    """
    found, window = [], list[float]()
    for step, loss in sorted(losses.items()):
        if not math.isfinite(loss):
            found.append(step)
            continue
        if len(window) >= _WINDOW // 2:
            median = statistics.median(window)
            spread = _MAD * statistics.median([abs(value - median) for value in window])
            if loss > median + _SPIKE * max(spread, 1e-9):
                found.append(step)
                continue
        window = [*window[-_WINDOW + 1 :], loss]
    return found


def rise(losses: Mapping[int, float]) -> float:
    """By how much the mean training loss of 8 steps was at most above that of 8 earlier ones; nan with too few.

    It also sees what comes in the first steps, before a spike can be told, and does not see a single step.
    """
    finite = [loss for _, loss in sorted(losses.items()) if math.isfinite(loss)]
    means = [statistics.fmean(finite[first : first + _MEAN]) for first in range(len(finite) - _MEAN + 1)]
    lowest, largest = math.inf, math.nan
    for earlier, mean in zip(means, means[_MEAN:], strict=False):
        lowest = min(lowest, earlier)
        largest = mean - lowest if math.isnan(largest) else max(largest, mean - lowest)
    return largest


def recorded_runs(grid: Grid) -> list[Run]:
    """Those that have a result and whose curves are there, whole."""
    results = read_results(grid.results_folder)
    return [
        run
        for run in grid.runs
        if run.id in results and max(read_curves(grid.run_dir(run)).loss, default=-1) == results[run.id].steps
    ]


def angles_over_depth(run_dir: Path, sublayer: str) -> dict[int, list[float]]:
    """Mean angle in radians of layers 1, 2, ... at a run's first and last log step; without steps that lack one."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = sorted(tag for tag in events.Tags()["scalars"] if tag.startswith(f"geometry/angle_{sublayer}/layer_"))
    curves = [{point.step: point.value for point in events.Scalars(tag)} for tag in tags]
    steps = sorted(curves[0]) if curves else []
    ends = dict.fromkeys((*steps[:1], *steps[-1:]))
    # A run that came apart has angles of nothing, or none.
    return {step: [curve[step] for curve in curves] for step in ends if all(curve.get(step, 0) > 0 for curve in curves)}


def study_text(grid: Grid, there: Sequence[Run]) -> str:
    """The page of the :func:`recorded_runs`; how many are missing is said."""
    parts = [
        f"# {grid.file.title}: angles and spikes",
        f"From the curves of {len(there)} of {len(grid.runs)} runs, by `python -m tools.paper study`.",
    ]
    for stage in grid.file.stages:
        members = [run for run in there if run.stage == stage]
        if members:
            parts += [f"## {stage}", _angles_text(grid, members), _spikes_text(grid, members)]
    return "\n\n".join(parts) + "\n"


def _angles_text(grid: Grid, runs: Sequence[Run]) -> str:
    """The first and the last log step of each variant and column, mean over seeds."""
    lines = [
        "Mean angle of a step, over layers k: exponent e of angle ~ k^e (-0.5: like 1/sqrt(k)), of all layers and "
        "without the first and the last; largest over smallest of angle times sqrt(k); mean over seeds.",
        "",
        "| | step | sublayer | e | e, inner | largest / smallest |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    groups: dict[tuple[str, int, str], list[Slope]] = defaultdict(list)
    for run in runs:
        for sublayer in SUBLAYERS:
            for step, angles in angles_over_depth(grid.run_dir(run), sublayer).items():
                groups[_label(run), step, sublayer].append(slope(step, angles))
    for (label, step, sublayer), slopes in groups.items():
        cells = [statistics.fmean(getattr(each, name) for each in slopes) for name in ("exponent", "inner", "ratio")]
        lines.append(f"| {label} | {step} | {sublayer} | {cells[0]:.2f} | {cells[1]:.2f} | {cells[2]:.1f} |")
    return "\n".join(lines)


def _spikes_text(grid: Grid, runs: Sequence[Run]) -> str:
    lines = [
        f"Spikes: steps whose training loss is {_SPIKE:g} robust deviations above the median of the {_WINDOW} before "
        f"(at least {_WINDOW // 2}, so none earlier; where the loss falls fast within them, small ones are not seen), "
        "or not finite; in brackets the largest gradient norm, and the "
        f"largest rise: from the mean loss of {_MEAN} steps to that of {_MEAN} later ones; a figure for each seed.",
        "",
        "| | spikes (largest gradient norm, largest rise) |",
        "| --- | --- |",
    ]
    rows: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        curves = read_curves(grid.run_dir(run))
        largest = curves.grad_norm_max()
        norm = "none" if largest is None else f"{largest:.1f}"
        rows[_label(run)].append(f"{len(spikes(curves.loss))} ({norm}, {rise(curves.loss):+.1f})")
    return "\n".join([*lines, *(f"| {label} | {', '.join(cells)} |" for label, cells in rows.items())])


def _label(run: Run) -> str:
    varied = [f"{name.rpartition('.')[2]}={value}" for name, value in run.varied.items() if name != SEED]
    return ", ".join([run.variant, *varied])
