"""The geometry of the residual stream as a table of text."""

from collections.abc import Iterator

from torch import Tensor

from megatron_ext import Geometry, ResidualSettings, scheme_of
from megatron_ext.residual import SUBLAYERS
from pretrain.monitor.geometry import has_clamp

_OF_SUBLAYERS = {
    "angle": "mean_angle",
    "largest": "largest_angle",
    "beta": "beta",
    "radial": "radial_share",
    "alpha": "step_size",
    "clamped": "clamped_share",
}
_OF_LAYERS = {
    "radius": "radius",
    "drift": "radius_drift",
    "max drift": "largest_radius_drift",
    "agree": "resultant_length",
}
_WIDTHS = dict.fromkeys((*_OF_SUBLAYERS, *_OF_LAYERS), 8) | {"drift": 9, "max drift": 10}
LEGEND = (
    "angle, largest: of a step, between the states before and after, mean and maximum, radians;",
    "beta: step size alpha x |tangent part of the update| / |state|; radial: share of the update along",
    "the state; clamped: share of tokens whose angle is cut off; radius: mean norm of the states that",
    "enter the layer; drift: of the norm, relative to layer 1; agree: length of the mean direction of",
    "these states, 0 spread evenly, 1 collapsed; a dash where the scheme has no such thing",
)


def geometry_rows(geometry: Geometry, settings: ResidualSettings) -> Iterator[dict[str, int | str | float | None]]:
    """One row for each sublayer: its layer (1-based), its name, and the columns of the table.

    None stands where the scheme has no such thing (a clamp, a sphere), and in an MLP's row for what its layer has once.

    Args:
        geometry: of the whole model.
        settings: of the residual, with the scheme's defaults filled in.
    """
    absent = set() if has_clamp(settings) else {"clamped"}
    if not scheme_of(settings).on_sphere:
        absent |= {"drift", "max drift"}
    for layer in range(len(geometry.radius)):
        for position, sublayer in enumerate(SUBLAYERS):
            row: dict[str, int | str | float | None] = {"layer": layer + 1, "sublayer": sublayer}
            for column, attribute in (_OF_SUBLAYERS | _OF_LAYERS).items():
                values: Tensor = getattr(geometry, attribute)[layer]
                shown = column not in absent and (values.dim() == 1 or position == 0)
                row[column] = (values[position] if values.dim() else values).item() if shown else None
            yield row


def geometry_table(geometry: Geometry, settings: ResidualSettings) -> list[str]:
    """The rows as lines of at most 100 characters, with a header; absent values are a dash."""
    header = f"{'layer':>5} {'sublayer':<9}"
    lines = [header + "".join(f"{name:>{width}}" for name, width in _WIDTHS.items())]
    for row in geometry_rows(geometry, settings):
        line = f"{row['layer']:>5} {row['sublayer']:<9}"
        for name, width in _WIDTHS.items():
            said_above = name in _OF_LAYERS and row["sublayer"] != SUBLAYERS[0]
            line += f"{'' if said_above else _short(row[name]):>{width}}"
        lines.append(line.rstrip())
    return lines


def _short(value: int | str | float | None) -> str:
    """Three digits in at most 7 characters, 8 with a sign."""
    if value is None:
        return "-"
    number = float(value)
    if 1e3 <= abs(number) < 1e6:
        return f"{number:.0f}"
    return f"{number:.3g}" if number == 0 or 1e-3 <= abs(number) < 1e3 else f"{number:.1e}"
