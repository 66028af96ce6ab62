"""The geometry of the residual stream as TensorBoard curves; :mod:`pretrain.monitor.tags` tells what each is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_ext import Geometry, GeometryProbe, ResidualSettings, scheme_of, with_defaults
from megatron_ext.residual import SUBLAYERS
from pretrain.monitor.tags import layer_tag

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
        per_sublayer: whether attention and MLP have one each, or the layer one.
    """

    name: str
    attribute: str
    written: Condition = _always
    per_sublayer: bool = True

    @property
    def names(self) -> list[str]:
        """Of the quantities, as they stand in tags."""
        return [f"{self.name}_{sublayer}" for sublayer in SUBLAYERS] if self.per_sublayer else [self.name]


CURVES = (
    Curve("angle", "mean_angle"),
    Curve("angle_max", "largest_angle"),
    Curve("beta", "beta"),
    Curve("radial_share", "radial_share"),
    # A constant step size is known from the configuration.
    Curve("alpha", "step_size", _learns_step_size),
    Curve("clamped_share", "clamped_share", _has_clamp),
    Curve("radius", "radius", _radius_varies, per_sublayer=False),
    Curve("radius_drift", "largest_radius_drift", _on_sphere, per_sublayer=False),
    Curve("resultant_length", "resultant_length", per_sublayer=False),
    Curve("activation_max", "largest_activation", per_sublayer=False),
    Curve("attention_logit_max", "largest_attention_logit", per_sublayer=False),
)


class GeometryCurves:
    """Those of :data:`CURVES` that the run's scheme has, one tag per layer."""

    def __init__(self, residual: ResidualSettings, probe: GeometryProbe) -> None:
        settings = with_defaults(residual)
        self._curves = [curve for curve in CURVES if curve.written(settings, probe)]

    @property
    def names(self) -> list[str]:
        """Of the quantities, as they stand in tags."""
        return [name for curve in self._curves for name in curve.names]

    def values(self, geometry: Geometry) -> dict[str, float]:
        """Tag -> value."""
        values = {"train/logit_max": geometry.largest_logit.item()}
        for curve in self._curves:
            for name, column in columns(curve, geometry):
                of_layers = enumerate(column.tolist(), start=1)
                values |= {layer_tag(f"geometry/{name}", layer): value for layer, value in of_layers}
        return values


def columns(curve: Curve, geometry: Geometry) -> Iterator[tuple[str, Tensor]]:
    """Name and values ``[num_layers]`` of each sublayer, or of the layers."""
    values: Tensor = getattr(geometry, curve.attribute)
    return zip(curve.names, values.reshape(len(values), -1).T, strict=True)
