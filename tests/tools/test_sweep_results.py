"""From results to states, table and picture, against numbers computed by hand."""

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import yaml

from pretrain.data.manifest import Manifest
from pretrain.errors import UserError
from tests.tools.sweeps import ENTROPY, add_result, all_rates, planned_run, small_grid
from tools.sweep.curves import MOST_POINTS, Curves, judge, thinned
from tools.sweep.data import samples_identity
from tools.sweep.grid import load_grid
from tools.sweep.plan import State, plan
from tools.sweep.plot import draw
from tools.sweep.results import RESULTS_NAME, read_results, record
from tools.sweep.table import mean_and_spread, table_text

SEEDS = "seeds/geonorm/seed=2"


def test_a_later_stage_waits_for_all_runs_it_takes_from(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    del results["rates/geonorm/lr=0.1/seed=1"]
    waiting = planned_run(grid, SEEDS, results)
    assert (waiting.state, waiting.detail) == (State.WAITING, "for 1 of 3 runs of rates/geonorm")
    assert planned_run(grid, "seeds/pre_norm/seed=2", results).taken == {"optimizer.lr": 0.1}


def test_the_lowest_loss_that_did_not_diverge_is_taken(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    assert planned_run(grid, SEEDS, results).taken == {"optimizer.lr": 0.01}
    add_result(grid, results, "rates/geonorm/lr=0.01/seed=1", 3.0, status="diverged", reason="by hand")
    assert planned_run(grid, SEEDS, results).taken == {"optimizer.lr": 0.1}
    for rate in (0.001, 0.1):
        add_result(grid, results, f"rates/geonorm/lr={rate}/seed=1", 3.0, status="diverged", reason="by hand")
    assert planned_run(grid, SEEDS, results).state == State.BLOCKED


def test_another_best_rate_makes_later_runs_stale(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    add_result(grid, results, SEEDS, 2.5)
    assert planned_run(grid, SEEDS, results).state == State.FINISHED
    add_result(grid, results, "rates/geonorm/lr=0.1/seed=1", 2.0)
    stale = planned_run(grid, SEEDS, results)
    assert (stale.state, stale.detail) == (State.CHANGED, "optimizer.lr: 0.01 -> 0.1")


def test_a_changed_grid_says_what_differs(tmp_path: Path) -> None:
    results = all_rates(small_grid(tmp_path))
    tree = yaml.safe_load((tmp_path / "grid.yaml").read_text())
    tree["variants"]["geonorm"]["optimizer.clip"] = 0.5
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    states = {each.run.id: each for each in plan(load_grid(tmp_path / "changed.yaml"), results, None)}
    changed = states["rates/geonorm/lr=0.01/seed=1"]
    assert (changed.state, changed.detail) == (State.CHANGED, "optimizer.clip: 1.0 -> 0.5")
    assert states[SEEDS].state == State.WAITING
    assert states["rates/pre_norm/lr=0.01/seed=1"].state == State.FINISHED


def test_a_changed_base_file_counts_as_well(tmp_path: Path) -> None:
    results = all_rates(small_grid(tmp_path))
    (tmp_path / "base.yaml").write_text("optimizer: {weight_decay: 0.2}")
    grid = load_grid(tmp_path / "grid.yaml")
    changed = planned_run(grid, "rates/geonorm/lr=0.01/seed=1", results)
    assert (changed.state, changed.detail) == (State.CHANGED, "optimizer.weight_decay: 0.1 -> 0.2")


def test_other_data_says_so(tmp_path: Path, manifest: Manifest) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    states = plan(grid, results, manifest)
    assert {each.state for each in states if each.run.stage == "rates"} == {State.CHANGED}
    assert states[0].detail == f"data: ffffffffffff -> {samples_identity(manifest)[:12]}"
    add_result(grid, results, states[0].run.id, 3.0, data=samples_identity(manifest))
    assert plan(grid, results, manifest)[0].state == State.FINISHED


def test_a_setting_that_is_newer_than_the_record_changes_nothing_by_default(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    first = results["rates/geonorm/lr=0.01/seed=1"]
    del first.settings["model.rope_base"]  # by default
    assert planned_run(grid, first.id, results).state == State.FINISHED
    del first.settings["train.micro_batch"]  # the grid gives it
    assert planned_run(grid, first.id, results).detail == "train.micro_batch: not recorded -> 4"


def test_results_are_kept_whole_and_in_one_line_a_run(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    for result in results.values():
        record(grid.results_folder, result)
    assert read_results(grid.results_folder) == results
    add_result(grid, results, "rates/geonorm/lr=0.01/seed=1", 2.75)
    record(grid.results_folder, results["rates/geonorm/lr=0.01/seed=1"])
    assert read_results(grid.results_folder) == results
    text = (grid.results_folder / RESULTS_NAME).read_text()
    assert text.count("\n") == 6
    (grid.results_folder / RESULTS_NAME).write_text(text[:-20])
    with pytest.raises(UserError, match=r"results\.jsonl, line 6: no result"):
        read_results(grid.results_folder)


def test_mean_and_spread_by_hand() -> None:
    assert mean_and_spread([1.0, 2.0, 3.0]) == "2.0000 ± 1.0000 (3)"
    assert mean_and_spread([1.0, 2.0]) == "1.5000 ± 0.7071 (2)"
    assert mean_and_spread([1.25]) == "1.2500 (1)"


def test_the_table_by_hand(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    why = "loss or gradient norm not finite at step 8; the trainer stopped"
    fields = {"status": "diverged", "reason": why, "grad_norm_max": 99.5, "steps_not_finite": 4}
    add_result(grid, results, "rates/pre_norm/lr=0.01/seed=1", 9.0, **fields)
    add_result(grid, results, "seeds/geonorm/seed=2", 2.0)
    add_result(grid, results, "seeds/geonorm/seed=3", 2.5)
    add_result(grid, results, "seeds/geonorm/seed=4", 9.0, **fields)
    add_result(grid, results, "seeds/pre_norm/seed=2", 2.0, status="failed", reason="exit status 1")
    lines = table_text(grid, plan(grid, results, None)).splitlines()
    assert "## rates: 8 steps of 128 tokens, 0.00 M tokens a run" in lines
    assert "| geonorm | 4.0000 (1) | **3.0000 (1)** | 3.5000 (1) | 3 of 3 | 0 | 0 | 0.50 | 0 | 250 |" in lines
    assert "| pre_norm | 4.5000 (1) | 1 diverged | **3.7500 (1)** | 3 of 3 | 1 | 0 | 99.50 | 4 | 250 |" in lines
    assert "| geonorm | 2.2500 ± 0.3536 (2), 1 diverged | 0.01 | 3 of 3 | 1 | 0 | 99.50 | 4 | 250 |" in lines
    assert "| pre_norm | 1 failed | 0.1 | 0 of 3 | 0 | 1 |  |  |  |" in lines
    assert f"- rates/pre_norm/lr=0.01/seed=1: diverged: {why}" in lines
    assert "- seeds/pre_norm/seed=2: failed: exit status 1" in lines
    assert "- runs: 12; 7 finished, 2 diverged, 1 failed, 2 to run" in lines
    assert "Shows nothing." in lines


def test_where_nothing_ran_the_cells_are_empty(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    lines = table_text(grid, plan(grid, {}, None)).splitlines()
    assert "| geonorm |  |  |  | 0 of 3 | 0 | 0 |  |  |  |" in lines


def curves(loss: list[float], norm: list[float], validation: dict[int, float]) -> Curves:
    steps = range(1, len(loss) + 1)
    return Curves(dict(zip(steps, loss, strict=True)), dict(zip(steps, norm, strict=True)), validation, 0.0)


@pytest.mark.parametrize(
    ("found", "exit_status", "status", "reason"),
    [
        (curves([3.0, 2.0], [1.0, 1.0], {2: 2.0}), 0, "finished", None),
        (curves([3.0, 2.0], [1.0, 1.0], {2: ENTROPY + 0.1}), 0, "finished", None),
        (curves([3.0, 2.0], [1.0, 1.0], {2: ENTROPY + 0.11}), 0, "diverged", "above the unigram entropy 5.0000"),
        (curves([3.0, 2.0], [1.0, 1.0], {2: math.nan}), 0, "diverged", "final validation loss is not finite"),
        (curves([3.0, math.nan], [1.0, 1.0], {}), 2, "diverged", "not finite at step 2"),
        (curves([3.0, 2.0], [1.0, math.inf], {2: 2.0}), 2, "diverged", "not finite at step 2"),
        (curves([math.nan, 2.0], [1.0, 1.0], {}), 2, "failed", "exit status 2 after step 2: the last line"),
        (curves([3.0, math.nan], [1.0, 1.0], {}), -9, "failed", "exit status -9"),
        (curves([3.0], [1.0], {}), 0, "failed", "ended at step 1 of 2"),
        (curves([], [], {}), 1, "failed", "exit status 1 after step 0"),
    ],
)
def test_how_a_run_ended(found: Curves, exit_status: int, status: str, reason: str | None) -> None:
    judged = judge(found, exit_status, "error: the last line", 2, ENTROPY, 0.1)
    assert judged[0] == status
    assert (judged[1] is None) if reason is None else (reason in str(judged[1]))


def test_curves_are_thinned_by_means() -> None:
    assert thinned({1: 4.0, 2: 2.0}) == [(1, 4.0), (2, 2.0)]
    long = thinned({step: float(step) for step in range(1, 251)})
    assert len(long) <= MOST_POINTS
    assert long[:2] == [(3, 2.0), (6, 5.0)]
    assert long[-1] == (250, 250.0)
    assert thinned({1: math.inf, 2: 1.0}) == [(1, None), (2, 1.0)]


def test_the_picture_shows_the_curves(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    add_result(grid, results, "seeds/geonorm/seed=2", 2.0)
    draw(grid, plan(grid, {}, None), tmp_path / "empty.png")
    draw(grid, plan(grid, results, None), tmp_path / "curves.png")
    blue = np.array([0x00, 0x77, 0xBB]) / 255
    counts = [
        int((np.abs(matplotlib.image.imread(tmp_path / name)[..., :3] - blue).max(-1) < 0.02).sum())
        for name in ("empty.png", "curves.png")
    ]
    assert counts[1] > counts[0] + 1000, "geonorm's lines in their colour"
