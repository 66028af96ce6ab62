"""Which curves of the geometry a run writes, and that the README tells of each."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from megatron_ext import GeometryProbe, ModelSettings, with_defaults
from pretrain.monitor.geometry import CURVES, GeometryCurves
from pretrain.monitor.geometry_table import LEGEND, geometry_rows, geometry_table
from pretrain.monitor.tensorboard import Board
from tests.launch import REPOSITORY
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")

ALWAYS = {"angle", "angle_max", "beta", "radial_share", "resultant_length"}
ONCE_PER_LAYER = {"radius", "radius_drift", "resultant_length"}


def observed(settings: ModelSettings) -> Any:
    stage = small.build(settings)
    probe = GeometryProbe(stage)
    tokens, _, positions, _ = small.batch()
    with torch.no_grad(), probe.recording():
        stage(tokens, positions, None)
    return probe


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


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
def test_a_run_has_the_curves_that_mean_something(
    scheme: str, residual: dict[str, Any], more: set[str], tmp_path: Path
) -> None:
    settings = small.settings(scheme, residual)
    probe = observed(settings)
    board = Board(tmp_path, 0, 0)
    curves = GeometryCurves(settings.residual, probe, board)
    geometry = probe.reduce()
    curves.write(geometry, 3)
    curves.write(geometry, 6)
    board.close()
    found = events(tmp_path)
    expected = {
        f"geometry/{name}{suffix}/layer_{layer:02d}"
        for name in ALWAYS | more
        for suffix in ([""] if name in ONCE_PER_LAYER else ["_attention", "_mlp"])
        for layer in range(1, 5)
    }
    assert set(found.Tags()["scalars"]) == expected
    points = found.Scalars("geometry/angle_mlp/layer_03")
    assert [point.step for point in points] == [3, 6]
    assert points[0].value == pytest.approx(geometry.mean_angle[2, 1].item(), rel=1e-6)
    assert charts(found) == expected


def charts(found: EventAccumulator) -> set[str]:
    """The tags that the charts of all layers show, each in exactly one."""
    (tensor,) = found.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    tags = found.Tags()["scalars"]
    shown = [
        tag
        for chart in layout.category[0].chart
        for pattern in chart.multiline.tag
        for tag in tags
        if re.match(pattern, tag)
    ]
    assert len(shown) == len(set(shown))
    return set(shown)


def test_the_readme_lists_every_curve_and_no_other() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| curve of `geometry` \|.*?\n\n", readme, re.DOTALL)
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:] if line]
    names = [name for row in rows for name in row]
    expected = [
        name
        for curve in CURVES
        for name in ([curve.name] if curve.name in ONCE_PER_LAYER else [f"{curve.name}_attention", f"{curve.name}_mlp"])
    ]
    assert names == expected


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
