"""The results as one picture: a row of panels a stage."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from pretrain.data.files import write_atomically
from tools.colours import COLOURS, DASHES, MARKERS
from tools.picture import as_png
from tools.sweep.grid import SEED, Grid
from tools.sweep.plan import Planned, State
from tools.sweep.results import Curve, Result
from tools.sweep.table import best_column, columns_of, final_losses, mean_loss

mpl.use("Agg")

_SMOOTHED = 7  # points of the thinned training curve that its line averages


@dataclass(frozen=True)
class Line:
    """Runs that differ in the seed alone."""

    label: str
    style: dict[str, Any]
    members: list[Planned]

    @property
    def results(self) -> list[Result]:
        """Of the finished ones."""
        return [each.result for each in self.members if each.state == State.FINISHED and each.result]

    @property
    def legend(self) -> str:
        """Label, mean final loss, and how many diverged."""
        losses = final_losses(self.members)
        mean = f"  {statistics.fmean(losses):.3f}" if losses else ""
        diverged = sum(each.state == State.DIVERGED for each in self.members)
        return self.label + mean + (f"  ({diverged} of {len(self.members)} diverged)" if diverged else "")


def draw(grid: Grid, planned: Sequence[Planned], path: Path) -> None:
    """Write ``path`` as PNG: training curves beside final losses, or beside validation curves."""
    stages = list(grid.file.stages)
    figure = Figure(figsize=(15, 6.2 * len(stages)), layout="constrained")
    axes = figure.subplots(len(stages), 2, squeeze=False)
    for (left, right), stage in zip(axes, stages, strict=True):
        members = [each for each in planned if each.run.stage == stage]
        setting = _numeric_setting(grid, stage)
        if setting:
            _draw_setting(left, grid, members, setting)
            lines = _best_lines(grid, members)
            _draw_training(right, lines)
            right.set_title(f"{stage}: training loss at the lowest of each, smoothed")
        else:
            lines = _lines(grid, members)
            _draw_training(left, lines)
            left.set_title(f"{stage}: training loss, mean over seeds, smoothed")
            _draw_validation(right, lines)
        left.set_title(left.get_title() or f"{stage}: final validation loss")
        _decorate(left, right, members, lines)
    figure.suptitle(grid.file.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_png(figure, 80))


def _numeric_setting(grid: Grid, stage: str) -> str | None:
    """The setting that a final loss can be drawn over, if it is all that the stage varies beside the seed."""
    varied = {name: values for name, values in grid.file.stages[stage].vary.items() if name != SEED}
    if len(varied) != 1:
        return None
    ((name, values),) = varied.items()
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)
    return name if numbers and len(values) > 1 else None


def style_of(grid: Grid, variant: str, column: int = 0) -> dict[str, Any]:
    """How the lines of a variant are drawn, those of its columns each by another dash."""
    number = list(grid.file.variants).index(variant)
    dash = (number // len(COLOURS) + column) % len(DASHES)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[dash],
        "markersize": 6,
        "linewidth": 1.6,
        "markerfacecolor": "none" if column else COLOURS[number % len(COLOURS)],
    }


def _lines(grid: Grid, members: Sequence[Planned]) -> list[Line]:
    columns = columns_of(each.run for each in members)
    lines = [
        Line(
            f"{variant} {column}".strip(),
            style_of(grid, variant, number),
            [each for each in members if (each.run.variant, each.run.column) == (variant, column)],
        )
        for variant in dict.fromkeys(each.run.variant for each in members)
        for number, column in enumerate(columns)
    ]
    return sorted(lines, key=_order)


def _best_lines(grid: Grid, members: Sequence[Planned]) -> list[Line]:
    """Each variant's column of the lowest mean final loss; all its runs where none finished."""
    lines = []
    for variant in dict.fromkeys(each.run.variant for each in members):
        of_variant = [each for each in members if each.run.variant == variant]
        best = best_column(of_variant)
        done = bool(final_losses(best))
        label = f"{variant} {best[0].run.column}" if done else variant
        if done and (diverged := sum(each.state == State.DIVERGED for each in of_variant)):
            label += f" ({diverged} of {len(of_variant)} diverged)"
        lines.append(Line(label, style_of(grid, variant), best if done else of_variant))
    return sorted(lines, key=_order)


def _order(line: Line) -> float:
    """The lowest mean first, in the legend as in the picture's end."""
    return mean_loss(line.members)


def _draw_setting(axes: Any, grid: Grid, members: Sequence[Planned], setting: str) -> None:
    """Final validation loss over the setting's value; a diverged run is a cross at the upper edge."""
    for number, variant in enumerate(dict.fromkeys(each.run.variant for each in members)):
        of_variant = [each for each in members if each.run.variant == variant]
        style = style_of(grid, variant)
        means = {
            value: statistics.fmean(losses)
            for value in grid.file.stages[of_variant[0].run.stage].vary[setting]
            if (losses := final_losses(each for each in of_variant if each.run.varied[setting] == value))
        }
        axes.plot(list(means), list(means.values()), **style)
        for each in of_variant:
            if each.state == State.DIVERGED:
                # Shifted a little, so that several at one value can be told apart.
                place = each.run.varied[setting] * (1 + 0.03 * (number - len(grid.file.variants) / 2))
                axes.plot(
                    [place],
                    [0.985],
                    transform=axes.get_xaxis_transform(),
                    marker="x",
                    color=style["color"],
                    markersize=9,
                )
    values = [each.run.varied[setting] for each in members]
    axes.set_xscale("log")
    axes.set_xticks(sorted(set(values)), [str(value) for value in sorted(set(values))])
    axes.minorticks_off()
    axes.set_xlabel(f"{setting} (a cross at the upper edge: diverged)")


def _draw_training(axes: Any, lines: Sequence[Line]) -> None:
    for line in lines:
        curve = _smoothed(_mean_curve([result.train for result in line.results]))
        every = max(1, len(curve) // 6)
        axes.plot([step for step, _ in curve], [loss for _, loss in curve], **line.style, markevery=every)
    axes.set_xlabel("step")


def _draw_validation(axes: Any, lines: Sequence[Line]) -> None:
    """Mean over seeds, and from the lowest to the highest of them as a band."""
    for line in lines:
        curves = [result.validation for result in line.results]
        mean = _mean_curve(curves)
        steps = [step for step, _ in mean]
        axes.plot(steps, [loss for _, loss in mean], **line.style)
        if len(curves) > 1:
            at_step = [
                [loss for curve in curves for at, loss in curve if at == step and loss is not None] for step in steps
            ]
            axes.fill_between(
                steps, list(map(min, at_step)), list(map(max, at_step)), color=line.style["color"], alpha=0.12
            )
    axes.set_xlabel("step")
    axes.set_title("validation loss, mean and range over seeds")


def _mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Mean at the steps where every curve has a finite point."""
    tables = [{step: loss for step, loss in curve if loss is not None} for curve in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    return [(step, statistics.fmean(table[step] for table in tables)) for step in steps]


def _smoothed(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Mean of each point and the ones before it."""
    losses = [loss for _, loss in curve]
    return [
        (step, statistics.fmean(losses[max(0, index + 1 - _SMOOTHED) : index + 1]))
        for index, (step, _) in enumerate(curve)
    ]


def _decorate(left: Any, right: Any, members: Sequence[Planned], lines: Sequence[Line]) -> None:
    """Entropy line, limits around what matters, and one legend outside, ordered by the final loss."""
    entropies = {each.result.unigram_entropy for each in members if each.counts and each.result}
    for axes in (left, right):
        low, high = _limits(axes, max(entropies, default=math.inf))
        if low < high:
            axes.set_ylim(low - 0.04 * (high - low), high + 0.08 * (high - low))
        for entropy in entropies:
            axes.axhline(entropy, color="black", linewidth=0.8, linestyle=":")
            axes.annotate(
                *("unigram entropy", (0.995, entropy)),
                xycoords=axes.get_yaxis_transform(),
                ha="right",
                va="top",
                annotation_clip=True,
            )
        axes.set_ylabel("nats per token")
        axes.grid(alpha=0.3)
    for line in lines:
        right.plot([], [], **line.style, label=line.legend)
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title="by final validation loss", frameon=False)


def _limits(axes: Any, entropy: float) -> tuple[float, float]:
    """Lowest and highest loss to show: none of the first steps' fall, and nothing above the unigram entropy."""
    shown: list[float] = []
    for line in axes.lines:
        if line.get_marker() != "x":
            losses = [float(loss) for loss in line.get_ydata()]
            shown += losses[len(losses) // 6 :]
    for band in axes.collections:
        shown += [float(y) for y in band.get_datalim(axes.transData).intervaly]
    return min(shown, default=0.0), min(max(shown, default=0.0), entropy)
