"""Which curves of the geometry a run has, and the table of text."""

from typing import Any

import pytest
import torch

from megatron_ext import GeometryProbe, ModelSettings, with_defaults
from pretrain.monitor.geometry import GeometryCurves
from pretrain.monitor.geometry_table import LEGEND, geometry_rows, geometry_table
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")

ONCE_PER_LAYER = {"radius", "radius_drift", "resultant_length", "activation_max", "attention_logit_max"}
ALWAYS = {"angle", "angle_max", "beta", "radial_share", "resultant_length", "activation_max", "attention_logit_max"}


def observed(settings: ModelSettings) -> Any:
    stage = small.build(settings)
    probe = GeometryProbe(stage)
    tokens, _, positions, _ = small.batch()
    with torch.no_grad(), probe.recording():
        stage(tokens, positions, None)
    return probe


@pytest.mark.parametrize(
    ("scheme", "residual", "more"),
    [
        ("geonorm", {}, {"clamped_share", "radius_drift"}),
        ("geonorm", {"clamp": "none", "radius": "learned"}, {"radius", "radius_drift"}),
        ("proj", {}, {"alpha", "radius_drift"}),
        ("ngpt_lerp", {}, {"alpha", "radius_drift"}),
        ("pre_norm", {}, {"radius"}),
        ("keel", {}, {"radius"}),
    ],
)
def test_a_run_has_the_curves_that_mean_something(scheme: str, residual: dict[str, Any], more: set[str]) -> None:
    settings = small.settings(scheme, residual)
    probe = observed(settings)
    curves = GeometryCurves(settings.residual, probe)
    geometry = probe.reduce()
    values = curves.values(geometry)
    assert values.pop("train/logit_max") == geometry.largest_logit.item()
    assert values.keys() == {
        f"geometry/{name}{suffix}/layer_{layer:02d}"
        for name in ALWAYS | more
        for suffix in ([""] if name in ONCE_PER_LAYER else ["_attention", "_mlp"])
        for layer in range(1, 5)
    }
    assert values["geometry/angle_mlp/layer_03"] == geometry.mean_angle[2, 1].item()
    assert values["geometry/resultant_length/layer_04"] == geometry.resultant_length[3].item()
    assert set(curves.names) == {tag.split("/")[1] for tag in values}


@pytest.mark.parametrize("scheme", ["geonorm", "pre_norm"])
def test_the_table_fits_a_terminal_and_dashes_out_what_the_scheme_has_not(scheme: str) -> None:
    settings = small.settings(scheme)
    geometry = observed(settings).reduce()
    residual = with_defaults(settings.residual)
    lines = geometry_table(geometry, residual)
    assert len(lines) == 1 + 2 * 4
    assert all(len(line) <= 100 for line in [*lines, *LEGEND])
    columns = dict(zip(lines[0].replace("max drift", "max_drift").split(), lines[5].split(), strict=True))
    assert (columns["layer"], columns["sublayer"]) == ("3", "attention")
    assert float(columns["angle"]) == pytest.approx(geometry.mean_angle[2, 0].item(), rel=0.01)
    assert float(columns["agree"]) == pytest.approx(geometry.resultant_length[2].item(), rel=0.01)
    on_sphere = scheme == "geonorm"
    assert [columns[name] == "-" for name in ("clamped", "drift", "max_drift")] == [not on_sphere] * 3
    rows = list(geometry_rows(geometry, residual))
    assert rows[4]["beta"] == geometry.beta[2, 0].item()
    assert rows[5]["angle"] == geometry.mean_angle[2, 1].item()
    assert rows[5]["radius"] is None


def test_the_columns_stay_apart_for_any_size_of_number() -> None:
    settings = small.settings("geonorm")
    geometry = observed(settings).reduce()
    for value in (-1.23456e-12, 0.0012345, 123.456, 123456.7, -9.8765e9, float("nan"), float("inf")):
        for name, tensor in vars(geometry).items():
            tensor.fill_(value if name == "radius_drift" else abs(value))  # all others are never negative
        lines = geometry_table(geometry, with_defaults(settings.residual))
        assert [len(line.split()) for line in lines[1:3]] == [12, 8], value
        assert max(map(len, lines)) <= 100
