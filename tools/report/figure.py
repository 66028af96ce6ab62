"""The charts of a report: a panel a quantity, a colour a run."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from tools.colours import COLOURS, DASHES
from tools.report.reading import Curve, RunRecord

mpl.use("Agg")

MOST_POINTS = 1000
_SMOOTHED = 0.02  # of a curve's points, in the mean that its line shows
Panel = Callable[[Any, Sequence[RunRecord], str], None]


def draw(runs: Sequence[RunRecord], axis: str, width: float = 15) -> Figure:
    """All panels; a run's name stands in the legend of the first."""
    figure = Figure(figsize=(width, 3.6 * ((len(PANELS) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(PANELS) + 1) // 2, 2).flatten()
    for axes, (title, panel) in zip(panels, PANELS.items(), strict=False):
        panel(axes, runs, axis)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
    for axes in panels[len(PANELS) :]:
        axes.set_axis_off()
    handles = [mpl.lines.Line2D([], [], **_style(number)) for number in range(len(runs))]
    figure.legend(handles, [run.name for run in runs], loc="outside upper left", ncols=4, frameon=False)
    return figure


def as_svg(figure: Figure) -> str:
    """The element <svg> alone, for a page of HTML."""
    image = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(image, format="svg", metadata={"Date": None})
    text = image.getvalue().decode()
    return text[text.index("<svg") :]


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points that keep the lowest and the highest of each stretch, so that no spike is lost."""
    if len(x) <= most:
        return x, y
    kept = set()
    for stretch in np.array_split(np.arange(len(x)), most // 2):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    places = sorted(kept)
    return x[places], y[places]


def smoothed(curve: Curve, share: float = _SMOOTHED) -> Curve:
    """Mean of each point and those before it, over ``share`` of the points."""
    count = max(1, round(share * len(curve.values)))
    sums = np.cumsum(np.insert(curve.values, 0, 0.0))
    ends = np.arange(1, len(curve.values) + 1)
    starts = np.maximum(0, ends - count)
    return Curve(curve.steps, (sums[ends] - sums[starts]) / (ends - starts))


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def _plot(axes: Any, run: RunRecord, curve: Curve, axis: str, **style: Any) -> None:
    axes.plot(*thinned(run.along(curve.steps, axis), curve.values), **style)


def _loss(axes: Any, runs: Sequence[RunRecord], axis: str) -> None:
    """Training loss, smoothed over the points themselves; validation as dots; spikes and what is not finite marked."""
    for number, run in enumerate(runs):
        style, curve = _style(number), run.curve("train/loss")
        _plot(axes, run, curve.finite, axis, color=style["color"], linewidth=0.6, alpha=0.35)
        _plot(axes, run, smoothed(curve.finite), axis, **style, linewidth=1.5)
        validation = run.curve("validation/loss").finite
        _plot(axes, run, validation, axis, color=style["color"], marker="o", markersize=4, linestyle="none")
        spikes = run.curve("events/spike").finite
        x = run.along(spikes.steps, axis)
        axes.plot(
            *(x, spikes.values),
            color=style["color"],
            marker="X",
            markeredgecolor="black",
            markersize=9,
            linestyle="none",
        )
        broken = run.along(curve.steps[~np.isfinite(curve.values)], axis)
        axes.plot(
            *(broken, np.full(len(broken), 0.97)),
            transform=axes.get_xaxis_transform(),
            marker="v",
            linestyle="none",
            color=style["color"],
        )
    axes.set_ylabel("nats per token")
    axes.set_xlabel(axis)


def _one(tag: str, unit: str, log: bool = False, smooth: bool = False) -> Panel:
    def panel(axes: Any, runs: Sequence[RunRecord], axis: str) -> None:
        for number, run in enumerate(runs):
            curve = run.curve(tag).finite
            if smooth:
                _plot(axes, run, curve, axis, color=_style(number)["color"], linewidth=0.6, alpha=0.35)
                curve = smoothed(curve)
            _plot(axes, run, curve, axis, **_style(number), linewidth=1.4)
        if log:
            axes.set_yscale("log")
        axes.set_ylabel(unit)
        axes.set_xlabel(axis)

    return panel


def _over_layers(name: str, unit: str) -> Panel:
    """The mean over the layers, and a band from the lowest layer to the highest."""

    def panel(axes: Any, runs: Sequence[RunRecord], axis: str) -> None:
        for number, run in enumerate(runs):
            curves = run.layers(name)
            steps = sorted(set.intersection(*(set(curve.steps) for curve in curves))) if curves else []
            if not steps:
                continue
            table = np.stack([curve.values[np.isin(curve.steps, steps)] for curve in curves])
            x = run.along(np.array(steps), axis)
            axes.plot(x, table.mean(0), **_style(number), linewidth=1.5)
            axes.fill_between(x, table.min(0), table.max(0), color=_style(number)["color"], alpha=0.12, linewidth=0)
        axes.set_ylabel(unit)
        axes.set_xlabel(axis)

    return panel


def _by_depth(names: Sequence[str], unit: str, log: bool = False) -> Panel:
    """The newest value of each layer; the second quantity dashed."""

    def panel(axes: Any, runs: Sequence[RunRecord], axis: str) -> None:
        for number, run in enumerate(runs):
            for name, dash in zip(names, ("-", "--"), strict=False):
                ends = [curve.values[-1] if len(curve.values) else np.nan for curve in run.layers(name)]
                layers = range(1, len(ends) + 1)
                axes.plot(layers, ends, color=_style(number)["color"], linestyle=dash, marker="o", markersize=3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if log:
            axes.set_yscale("log")
        axes.set_ylabel(unit)
        axes.set_xlabel("layer")

    return panel


PANELS: dict[str, Panel] = {
    "loss: line; validation: dots; spikes: crosses; not finite: triangles above": _loss,
    "gradient norm": _one("train/grad_norm", "norm", log=True, smooth=True),
    "learning rate": _one("train/lr", ""),
    "tokens per second and GPU": _one("throughput/tokens_per_second_per_gpu", "1/s"),
    "MFU (empty where the peak is not known)": _one("throughput/mfu", "share of the peak"),
    "collapse: resultant length, mean over layers and range": _over_layers("geometry/resultant_length", "0 to 1"),
    "angle of attention, mean over layers and range": _over_layers("geometry/angle_attention", "radians"),
    "angle of the MLP, mean over layers and range": _over_layers("geometry/angle_mlp", "radians"),
    "angles over depth in the end: attention, MLP dashed": _by_depth(
        ["geometry/angle_attention", "geometry/angle_mlp"], "radians"
    ),
    "update over weights, by depth in the end": _by_depth(["gradients/update_ratio"], "ratio", log=True),
}
