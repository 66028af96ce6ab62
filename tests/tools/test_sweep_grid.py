"""The grid file: its runs, and every mistake in it told in one line before anything starts."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import UserError
from tests.tools.sweeps import all_rates, content, small_grid, write_grid
from tools.sweep.__main__ import choose, list_runs
from tools.sweep.grid import load_grid
from tools.sweep.results import record

ROOT = Path(__file__).parents[2]
SCHEMES = (
    *("geonorm", "proj", "cayley", "p", "pre_norm", "post_norm"),
    *("deep_norm", "sandwich_norm", "peri_ln", "pre_dyt", "keel", "ngpt_lerp"),
)


def test_the_runs_in_order(tmp_path: Path) -> None:
    ids = [run.id for run in small_grid(tmp_path).runs]
    assert ids[:3] == [f"rates/geonorm/lr={rate}/seed=1" for rate in (0.001, 0.01, 0.1)]
    assert ids[6:] == [f"seeds/{variant}/seed={seed}" for variant in ("geonorm", "pre_norm") for seed in (2, 3, 4)]


def test_later_places_win_and_all_settings_arrive(tmp_path: Path) -> None:
    tree = content()
    tree["variants"]["geonorm"]["optimizer.clip"] = 0.5
    tree["stages"]["seeds"]["settings"] = {"train": {"steps": 12}}
    grid = load_grid(write_grid(tmp_path, tree))
    run = next(run for run in grid.runs if run.id == "seeds/geonorm/seed=3")
    config = grid.config(run, {"optimizer.lr": 0.25})
    assert (config.train.steps, config.train.seed, config.optimizer.clip, config.optimizer.lr) == (12, 3, 0.5, 0.25)
    assert config.run.dir == tmp_path / "work/runs/seeds/geonorm/seed=3/train"
    assert grid.config(grid.runs[0], {}).train.steps == 8


def change(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(tree: dict[str, Any]) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (change("colour", value=1), "colour: "),
        (change("data", "vocabulary", value=1), r"data\.vocabulary: "),
        (
            change("settings", "optimizer.rate", value=1),
            r"run rates/geonorm/lr=0\.001/seed=1: .*optimizer\.rate is not",
        ),
        (change("settings", "optimizer.warmup_steps", value=8), r"warmup_steps=8 must be below train\.steps=8"),
        (change("settings", "optimizer.clip", value="soft"), r"optimizer\.clip='soft'"),
        (change("settings", "validation.every", value=0), r"validation\.every=0: a sweep compares"),
        (change("settings", "run.dir", value="x"), r"run\.dir is set by the sweep itself"),
        (change("variants", "other", value={"model.residual.scheme": "geo"}), r"run rates/other/.*scheme=geo: unknown"),
        (change("variants", "again", value={"model.residual.scheme": "geonorm"}), "rates/again/.* is the same run as"),
        (change("variants", "geonorm", "optimizer.lr", value=1.0), r"optimizer\.lr is also given in variants\.geonorm"),
        (
            change("stages", "rates", "vary", "optimizer.lr", value=[0.001, "1e-3"]),
            "lr=0.001/seed=1 is the same run as",
        ),
        (change("stages", "rates", "vary", "train.seed", value=[1, 1]), "seed=1 is the same run as"),
        (change("stages", "rates", "variants", value=["geo"]), "geo is not a variant"),
        (change("stages", "seeds", "take", value={"optimizer.lr": "seeds"}), "seeds is not an earlier stage"),
        (change("stages", "seeds", "take", value={"optimizer.clip": "rates"}), r"does not vary optimizer\.clip"),
        (change("stages", "rates", "variants", value=["geonorm"]), "stage rates has no runs of pre_norm"),
        (lambda tree: tree.pop("stages"), "it has no stages, so it is no sweep"),
        (change("base", value="absent.yaml"), r"there is no file .*absent\.yaml"),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, mistake: Callable[[dict[str, Any]], None], message: str) -> None:
    tree = content()
    mistake(tree)
    path = write_grid(tmp_path, tree)
    with pytest.raises(UserError, match=message) as refused:
        load_grid(path)
    assert str(refused.value).startswith(str(path))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write_grid(tmp_path, content())
    path.write_text(path.read_text().replace("  pre_norm:", "  geonorm:"))
    with pytest.raises(UserError, match="geonorm is given twice"):
        load_grid(path)


def test_the_command_line_tells_a_mistake_in_one_line(tmp_path: Path) -> None:
    path = write_grid(tmp_path, content() | {"colour": 1})
    done = subprocess.run([sys.executable, "-m", "tools.sweep", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path}: colour: ")
    assert done.stderr.count("\n") == 1


def options(run: str | None = None, index: int | None = None, of: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(run=run, index=index, of=of)


def test_parts_are_whole_variants_and_together_all_runs(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    parts = [[run.id for run in grid.runs if choose(grid, options(index=index, of=2))(run)] for index in (0, 1)]
    assert sorted(parts[0] + parts[1]) == sorted(run.id for run in grid.runs)
    assert {run_id.split("/")[1] for run_id in parts[0]} == {"geonorm"}
    one = [run.id for run in grid.runs if choose(grid, options(run="seeds/pre_norm/seed=3"))(run)]
    assert one == ["seeds/pre_norm/seed=3"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (options(run="seeds/pre_norm/seed=9"), "no run of"),
        (options(index=0), "belong together"),
        (options(index=2, of=2), "parts count from 0 to 1"),
    ],
)
def test_parts_that_do_not_exist_are_refused(tmp_path: Path, wrong: argparse.Namespace, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(small_grid(tmp_path), wrong)


def test_the_list_shows_every_run_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = small_grid(tmp_path)
    results = all_rates(grid)
    del results["rates/pre_norm/lr=0.01/seed=1"]
    for result in results.values():
        record(grid.results_folder, result)
    list_runs(grid, None, lambda run: True)
    note, *lines = capsys.readouterr().out.splitlines()
    assert note.startswith("data: not built yet")
    assert len(lines) == len(grid.runs)
    assert lines[0] == "finished  rates/geonorm/lr=0.001/seed=1"
    assert lines[4] == "to run    rates/pre_norm/lr=0.01/seed=1"
    assert lines[-1] == "waiting   seeds/pre_norm/seed=4  (for 1 of 3 runs of rates/pre_norm)"


def test_the_committed_grid_is_the_study_it_says() -> None:
    grid = load_grid(ROOT / "configs/paper/schemes_small.yaml")
    by_stage = {stage: [run for run in grid.runs if run.stage == stage] for stage in grid.file.stages}
    assert {stage: len(runs) for stage, runs in by_stage.items()} == {"rates": 48, "seeds": 36, "bias": 24}
    configs = {run.id: grid.config(run, grid.first_candidates(run)) for run in grid.runs}
    assert tuple(dict.fromkeys(configs[run.id].model.residual.scheme for run in by_stage["rates"])) == SCHEMES
    assert {configs[run.id].model.residual.p for run in grid.runs if run.variant == "p"} == {3}
    assert {configs[run.id].train.steps for run in by_stage["seeds"]} == {600}
    assert {configs[run.id].model.output_bias for run in (*by_stage["rates"], *by_stage["seeds"])} == {"unigram"}
    assert sum(configs[run.id].model.output_bias == "none" for run in by_stage["bias"]) == 12
    # Beside the scheme, the rate, the seed, the bias and the length there is no difference.
    common = {
        (
            config.model_copy(update={"run": None, "model": None, "train": None, "optimizer": None}).model_dump_json(),
            config.optimizer.model_copy(update={"lr": 1.0}).model_dump_json(),
            config.train.model_copy(update={"steps": 1, "seed": 1}).model_dump_json(),
        )
        for config in configs.values()
    }
    assert len(common) == 1
