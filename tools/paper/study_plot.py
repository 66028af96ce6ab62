"""The study as one picture: a row of panels a stage, angles over depth beside losses step by step."""

import io
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator

from pretrain.data.files import write_atomically
from tools.paper.study import SUBLAYERS, angles_over_depth
from tools.sweep.curves import read_curves
from tools.sweep.grid import Grid, Run
from tools.sweep.plot import style_of
from tools.sweep.results import Result, read_results
from tools.sweep.table import columns_of

mpl.use("Agg")


def draw_study(grid: Grid, runs: Sequence[Run], path: Path) -> None:
    """Write ``path`` as PNG from the curves of ``runs``, all of them recorded."""
    stages = list(grid.file.stages)
    figure = Figure(figsize=(18, 4.6 * len(stages)), layout="constrained")
    results = read_results(grid.results_folder)
    for row, stage in zip(figure.subplots(len(stages), 3, squeeze=False), stages, strict=True):
        members = [run for run in runs if run.stage == stage]
        best = {run.variant: _best_column(members, run.variant, results) for run in members}
        for axes, sublayer in zip(row, SUBLAYERS, strict=False):
            for variant, some in best.items():
                _draw_angles(axes, some, grid, sublayer, style_of(grid, variant))
            _decorate_angles(axes, f"{stage}: angle of {sublayer} at each one's best {_names(members)}".rstrip())
        _draw_losses(row[-1], grid, members)
    figure.suptitle(grid.file.title)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=80)
    write_atomically(path, image.getvalue())


def _names(members: Sequence[Run]) -> str:
    return columns_of(members)[0].partition("=")[0] if members else ""


def _best_column(members: Sequence[Run], variant: str, results: dict[str, Result]) -> list[Run]:
    """A variant's runs of the lowest mean final loss; of its first column where all diverged."""
    columns: dict[str, list[Run]] = defaultdict(list)
    for run in members:
        if run.variant == variant:
            columns[run.column].append(run)
    means = {
        column: statistics.fmean(losses)
        for column, some in columns.items()
        if len(losses := [loss for run in some if (loss := results[run.id].final_loss) is not None]) == len(some)
        and all(results[run.id].status == "finished" for run in some)
    }
    return columns[min(means, key=lambda column: means[column]) if means else next(iter(columns))]


def _draw_angles(axes: Any, runs: Sequence[Run], grid: Grid, sublayer: str, style: dict[str, Any]) -> None:
    """Mean over seeds: the first log step pale, the last one full."""
    by_step: dict[int, list[list[float]]] = defaultdict(list)
    for run in runs:
        for step, angles in angles_over_depth(grid.run_dir(run), sublayer).items():
            by_step[step].append(angles)
    for step, curves in sorted(by_step.items()):
        last = step == max(by_step)
        mean = [statistics.fmean(layer) for layer in zip(*curves, strict=True)]
        label = {"label": f"{runs[0].variant} {runs[0].column}".rstrip()} if last else {}
        axes.plot(range(1, len(mean) + 1), mean, **style, alpha=1 if last else 0.3, **label)


def _decorate_angles(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10)
    drawn = [line.get_xydata() for line in axes.lines]
    if not drawn:
        axes.set_axis_off()
        return
    axes.set_xscale("log")
    axes.set_yscale("log")
    depth = max(len(points) for points in drawn)
    top = max(points[0][1] for points in drawn)
    layers = range(1, depth + 1)
    axes.plot(layers, [top / layer**0.5 for layer in layers], "k:", linewidth=1.2, label="like 1/sqrt(k)")
    ticks = [layer for layer in (1, 2, 3, 4, 6, 8, 12, 16, 24, 36) if layer <= depth]
    axes.set_xticks(ticks, [str(layer) for layer in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.set_xlabel("layer k (pale: at the first log step)")
    axes.set_ylabel("mean angle of a step, radians")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_losses(axes: Any, grid: Grid, members: Sequence[Run]) -> None:
    """Each run of the stage's last column, every step as it was."""
    column = columns_of(members)[-1] if members else ""
    axes.set_title(f"training loss of every step and seed, {column}".rstrip(", "), fontsize=10)
    if not members:
        axes.set_axis_off()
        return
    seen = set()
    for run in members:
        if run.column != column:
            continue
        loss = read_curves(grid.run_dir(run)).loss
        style = {"color": style_of(grid, run.variant)["color"], "linewidth": 0.9}
        axes.plot(list(loss), list(loss.values()), **style, label=run.variant if run.variant not in seen else None)
        seen.add(run.variant)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
