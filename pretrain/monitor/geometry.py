"""The geometry of the residual stream as TensorBoard curves; this is the one place that names them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_ext import Geometry, GeometryProbe, ResidualSettings, scheme_of, with_defaults
from megatron_ext.residual import SUBLAYERS
from pretrain.monitor.tensorboard import Board

Condition = Callable[[ResidualSettings, GeometryProbe], bool]


def _always(settings: ResidualSettings, probe: GeometryProbe) -> bool:
    return True


def _learns_step_size(settings: ResidualSettings, probe: GeometryProbe) -> bool:
    return any(isinstance(residual.step_size(), Tensor) for residual in probe.residuals)


def has_clamp(settings: ResidualSettings) -> bool:
    """Whether the angle of a step is bounded by a clamp; the settings hold their scheme's defaults."""
    return settings.clamp not in (None, "none")


def _has_clamp(settings: ResidualSettings, probe: GeometryProbe) -> bool:
    return has_clamp(settings)


def _on_sphere(settings: ResidualSettings, probe: GeometryProbe) -> bool:
    return scheme_of(settings).on_sphere


def _radius_varies(settings: ResidualSettings, probe: GeometryProbe) -> bool:
    return not _on_sphere(settings, probe) or settings.radius == "learned"


@dataclass(frozen=True)
class Curve:
    """One quantity of the residual stream.

    Attributes:
        name: its tags are geometry/NAME/layer_XX, or geometry/NAME_attention/layer_XX and NAME_mlp.
        attribute: of :class:`megatron_ext.Geometry`, which defines it.
        written: whether a run has it.
    """

    name: str
    attribute: str
    written: Condition = _always


CURVES = (
    Curve("angle", "mean_angle"),
    Curve("angle_max", "largest_angle"),
    Curve("beta", "beta"),
    Curve("radial_share", "radial_share"),
    # A constant step size is known from the configuration.
    Curve("alpha", "step_size", _learns_step_size),
    Curve("clamped_share", "clamped_share", _has_clamp),
    Curve("radius", "radius", _radius_varies),
    Curve("radius_drift", "largest_radius_drift", _on_sphere),
    Curve("resultant_length", "resultant_length"),
)


class GeometryCurves:
    """Writes those of :data:`CURVES` that the run's scheme has, one tag per layer."""

    def __init__(self, residual: ResidualSettings, probe: GeometryProbe, board: Board) -> None:
        settings = with_defaults(residual)
        self._curves = [curve for curve in CURVES if curve.written(settings, probe)]
        self._board = board
        self._charts_made = False

    def write(self, geometry: Geometry, step: int) -> None:
        """One point of every curve; the first time also the charts that show all layers in one."""
        named = [column for curve in self._curves for column in columns(curve, geometry)]
        if not self._charts_made:
            self._charts_made = True
            self._board.charts("geometry", {name: f"geometry/{name}/layer_" for name, _ in named})
        for name, values in named:
            for layer, value in enumerate(values.tolist(), start=1):
                self._board.scalar(f"geometry/{name}/layer_{layer:02d}", value, step)


def columns(curve: Curve, geometry: Geometry) -> Iterator[tuple[str, Tensor]]:
    """Name and values [num_layers] of each sublayer, or of the layers."""
    values: Tensor = getattr(geometry, curve.attribute)
    if values.dim() == 1:
        yield curve.name, values
        return
    for position, sublayer in enumerate(SUBLAYERS):
        yield f"{curve.name}_{sublayer}", values[:, position]
