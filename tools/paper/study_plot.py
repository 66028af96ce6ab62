"""The study's pictures: angles over depth, and training losses step by step."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator

from pretrain.data.files import write_atomically
from tools.colours import COLOURS
from tools.paper.study import SUBLAYERS, angles_over_depth
from tools.picture import as_png
from tools.sweep.curves import read_curves
from tools.sweep.grid import Grid, Run
from tools.sweep.plan import plan
from tools.sweep.plot import style_of
from tools.sweep.results import read_results
from tools.sweep.table import best_column, columns_of

mpl.use("Agg")


def draw_angles(grid: Grid, runs: Sequence[Run], path: Path) -> None:
    """Write ``path`` as PNG: a row of panels a stage, each variant of ``runs`` (all recorded) at its best column."""
    stages = list(grid.file.stages)
    figure = Figure(figsize=(14, 4.2 * len(stages)), layout="constrained")
    planned = [each for each in plan(grid, read_results(grid.results_folder), None) if each.run in runs]
    for row, stage in zip(figure.subplots(len(stages), len(SUBLAYERS), squeeze=False), stages, strict=True):
        members = [each for each in planned if each.run.stage == stage]
        best = {
            variant: [each.run for each in best_column([each for each in members if each.run.variant == variant])]
            for variant in dict.fromkeys(each.run.variant for each in members)
        }
        varied = columns_of(each.run for each in members)[0].partition("=")[0] if members else ""
        for axes, sublayer in zip(row, SUBLAYERS, strict=True):
            for variant, some in best.items():
                _draw_mean_angles(axes, some, grid, sublayer, style_of(grid, variant))
            _decorate_angles(axes, f"{stage}: angle of {sublayer} at each one's best {varied}".rstrip())
        if row[-1].lines:
            row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.suptitle(grid.file.title)
    write_atomically(path, as_png(figure, 70))


def _draw_mean_angles(axes: Any, runs: Sequence[Run], grid: Grid, sublayer: str, style: dict[str, Any]) -> None:
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


def draw_losses(grid: Grid, runs: Sequence[Run], stage: str, path: Path) -> None:
    """Write ``path`` as PNG: training losses of every step, a row a variant, a column as in the table."""
    members = [run for run in runs if run.stage == stage]
    variants = list(dict.fromkeys(run.variant for run in members))
    columns = columns_of(run for run in grid.runs if run.stage == stage)
    figure = Figure(figsize=(4 * len(columns), 2.6 * len(variants)), layout="constrained")
    rows = figure.subplots(len(variants), len(columns), squeeze=False, sharex=True, sharey=True)
    for row, variant in zip(rows, variants, strict=True):
        for axes, column in zip(row, columns, strict=True):
            axes.set_title(f"{variant} {column}".rstrip(), fontsize=9)
            axes.grid(alpha=0.3)
            for run, colour in zip(_of(members, variant, column), cycle(COLOURS), strict=False):
                loss = read_curves(grid.run_dir(run)).loss
                axes.plot(list(loss), list(loss.values()), color=colour, linewidth=0.8)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("training loss, nats per token", fontsize=9)
    write_atomically(path, as_png(figure, 70))


def _of(members: Sequence[Run], variant: str, column: str) -> list[Run]:
    return [run for run in members if (run.variant, run.column) == (variant, column)]
