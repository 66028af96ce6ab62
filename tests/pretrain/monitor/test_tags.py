"""The table of tags against what real runs write, and against its page."""

import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from megatron_ext.flops import CONVENTION
from pretrain.monitor.geometry import CURVES
from pretrain.monitor.hparams import CURVES as COMPARED
from pretrain.monitor.tags import BY_TOKENS, GROUPS, TAGS, find, page
from tests.launch import REPOSITORY
from tests.pretrain import runs
from tests.pretrain.monitor import events

NOT_IN_THE_RUNS = {
    "geometry/alpha_{sublayer}/{layer}",  # test_geometry.py
    "geometry/radius/{layer}",
    "validation/loss/{name}",  # ../test_mixture_runs.py
    "validation/bits_per_byte/{name}",
    "train/global_batch",  # ../test_restart.py
    "data/bad_samples",  # data/test_damage.py
    "data/documents",  # test_stream_runs.py
    "data/{name}_documents",
    "system/gpu_memory_gib",  # need a GPU
    "system/gpu_memory_reserved_gib",
    "events/spike",
    "events/spike_report",
}


@pytest.fixture(scope="module")
def written(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two data-parallel ranks that was resumed."""
    folder = tmp_path_factory.mktemp("tags")
    log, run = folder / "log", folder / "run"
    for steps in (3, 6):
        settings = [f"data.manifest={manifest}", f"run.dir={run}", f"train.steps={steps}", "logging.peak_tflops=0.5"]
        runs.finish(runs.start(settings, 2, log), log)
    return run


def tags_of(run: Path) -> set[str]:
    found = events.read(run / "tensorboard")
    by_tokens = events.read(run / "tensorboard" / BY_TOKENS)
    return {*found.Tags()["scalars"], *events.texts(found), *by_tokens.Tags()["scalars"]}


@pytest.mark.dist
def test_what_a_run_writes_is_in_the_table_and_the_other_way_round(written: Path) -> None:
    rows = {tag: find(tag) for tag in tags_of(written)}
    assert [tag for tag, row in rows.items() if row is None] == []
    assert {row.name for row in rows.values() if row} == {row.name for row in TAGS} - NOT_IN_THE_RUNS


@pytest.mark.dist
def test_curves_over_tokens_are_those_over_steps(written: Path) -> None:
    for group in ("train", "validation"):
        by_steps = events.points(written / "tensorboard", f"{group}/loss")
        by_tokens = events.points(written / "tensorboard" / BY_TOKENS, f"{group}/loss_by_tokens")
        assert by_tokens == [(step * 4 * 32, loss) for step, loss in by_steps]
    clock = [
        point.wall_time for point in events.read(written / "tensorboard" / BY_TOKENS).Scalars("train/loss_by_tokens")
    ]
    assert clock == sorted(clock)


@pytest.mark.dist
def test_every_chart_of_the_layout_shows_something(written: Path) -> None:
    tags = tags_of(written)
    layout = events.layout(events.read(written / "tensorboard"))
    assert [category.closed for category in layout.category] == [False, True, True, True]
    first = layout.category[0]
    assert [chart.title for chart in first.chart][:3] == [
        "loss, validation loss, spikes",
        "gradient norm",
        "learning rate",
    ]
    assert "MFU" in {chart.title for chart in first.chart}
    for category in layout.category:
        for chart in category.chart:
            assert any(re.search(pattern, tag) for pattern in chart.multiline.tag for tag in tags), chart.title
    all_layers = [p for category in layout.category[1:3] for chart in category.chart for p in chart.multiline.tag]
    for tag in tags:
        if tag.startswith(("geometry/", "gradients/")):
            assert sum(re.search(pattern, tag) is not None for pattern in all_layers) == 1, tag


def test_no_two_rows_claim_a_tag() -> None:
    for row in TAGS:
        assert row.group in GROUPS
        example = row.name.replace("{layer}", "layer_03").replace("{part}", "head").replace("{sublayer}", "mlp")
        assert [other.name for other in TAGS if other.pattern.fullmatch(example.replace("{name}", "books"))] == [
            row.name
        ]
    assert find("train/los") is None
    assert find("geometry/angle_mlp/layer_3") is None


def test_the_geometry_of_the_table_is_that_of_the_curves() -> None:
    names = {row.name.split("/")[1] for row in TAGS if row.group == "geometry"}
    assert names == {f"{c.name}_{{sublayer}}" if c.per_sublayer else c.name for c in CURVES}


def test_the_page_is_the_table() -> None:
    text = (REPOSITORY / "pretrain/monitor/README.md").read_text(encoding="utf-8")
    assert text == "\n".join(page(CONVENTION)) + "\n", "python -m pretrain.monitor.tags > pretrain/monitor/README.md"


def test_the_tab_hparams_compares_curves_of_the_table() -> None:
    assert all(find(tag) for tag in COMPARED)


@pytest.mark.dist
def test_settings_are_compared_by_what_the_command_line_said(written: Path) -> None:
    metadata = events.read(written / "tensorboard").SummaryMetadata("_hparams_/experiment")
    experiment = HParamsPluginData.FromString(metadata.plugin_data.content).experiment
    assert [metric.name.tag for metric in experiment.metric_infos] == list(COMPARED)
    infos = {info.name: info.differs for info in experiment.hparam_infos}
    assert all(infos[name] for name in ("train.steps", "model.residual.scheme", "optimizer.lr"))
    assert not any(infos[name] for name in ("optimizer.beta2", "parallel.tp"))
    assert not any(name.startswith(("run.", "data.")) for name in infos)
