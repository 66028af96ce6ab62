"""The papers' tables with recorded and given runs, and what is read off curves."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from pretrain.errors import UserError
from tests.launch import REPOSITORY
from tests.pretrain import runs
from tests.tools.sweeps import add_result, content, planned_run, write_grid
from tools.paper.__main__ import main
from tools.paper.rows import rows_of
from tools.paper.study import rise, slope, spikes
from tools.paper.targets import TOKENIZERS, Target, load_targets
from tools.sweep.grid import Grid, load_grid
from tools.sweep.results import Result, record

RATES = "rates/{}/lr={}/seed=1"


def target(**fields: object) -> Target:
    base = {"title": "A table", "grid": "grid.yaml", "stage": "rates", "measure": "perplexity", "tokenizer": "gpt2"}
    return Target.model_validate(base | {"said": "nothing"} | fields)


def keep(grid: Grid, name: str, loss: float, **fields: object) -> None:
    found: dict[str, Result] = {}
    add_result(grid, found, name, loss)
    record(grid.results_folder, dataclasses.replace(found[name], **fields))  # type: ignore[arg-type]


def test_theirs_stand_beside_ours_and_what_did_not_run_stays_empty(tmp_path: Path) -> None:
    grid = load_grid(write_grid(tmp_path, content()))
    keep(grid, RATES.format("geonorm", 0.001), 2.0, tokenizer=TOKENIZERS["gpt2"], bits_per_byte=1.25)
    keep(grid, RATES.format("geonorm", 0.01), 3.0, tokenizer="0" * 64)
    keep(grid, RATES.format("pre_norm", 0.1), 9.0, status="diverged", reason="it went up")
    theirs = {"geonorm, lr=0.001": 7.5, "pre_norm, lr=0.01": 8.5}
    rows = {row.label: row for row in rows_of(target(theirs=theirs), tmp_path, {})}
    same, other = rows["geonorm, lr=0.001"], rows["geonorm, lr=0.01"]
    assert (same.theirs, same.bits_per_byte, list(same.remarks)) == (7.5, 1.25, [])
    assert same.ours == pytest.approx(math.exp(2.0))
    assert (other.bits_per_byte, list(other.remarks)) == (None, ["other tokenizer"])
    empty = rows["pre_norm, lr=0.01"]
    assert (empty.theirs, empty.ours, empty.tokens, list(empty.remarks)) == (8.5, None, 8 * 4 * 32, [])
    assert list(rows["pre_norm, lr=0.1"].remarks) == ["diverged: it went up"]
    unstated = rows_of(target(tokenizer=None, measure="loss"), tmp_path, {})[0]
    assert (unstated.ours, list(unstated.remarks)) == (2.0, ["tokenizer: theirs is not stated"])


def test_tokens_of_a_growing_batch_are_counted_as_they_come(tmp_path: Path) -> None:
    tree = content()
    tree["settings"] |= {"train.micro_batch": 2, "train.rampup.start": 2, "train.rampup.increment": 2}
    tree["settings"]["train.rampup.samples"] = 6  # 3 steps of 2 samples, then 5 of 4
    row = rows_of(target(grid=write_grid(tmp_path, tree).name), tmp_path, {})[0]
    assert row.tokens == (3 * 2 + 5 * 4) * 32


def test_seeds_are_averaged(tmp_path: Path) -> None:
    tree = content()
    tree["stages"] = {"seeds": {"vary": {"train.seed": [2, 3, 4]}}}
    grid = load_grid(write_grid(tmp_path, tree))
    for seed, loss in ((2, 2.0), (3, 2.2)):
        keep(grid, f"seeds/geonorm/seed={seed}", loss, bits_per_byte=loss / 2)
    row = rows_of(target(stage="seeds", measure="loss"), tmp_path, {})[0]
    assert row.ours == pytest.approx(2.1)
    assert row.spread == pytest.approx(0.2 / math.sqrt(2))
    assert row.bits_per_byte == pytest.approx(1.05)


@pytest.mark.dist
def test_a_run_that_was_started_alone_fills_its_row(tmp_path: Path, manifest: object) -> None:
    data = Path(str(manifest.folder.where)) / "manifest.json"  # type: ignore[attr-defined]
    grid = load_grid(write_grid(tmp_path, content()))
    run = planned_run(grid, RATES.format("geonorm", 0.01), {}).run
    log = tmp_path / "log"
    settings = [f"data.manifest={data}", f"run.dir={tmp_path / 'alone'}", "train.steps=8", "validation.every=8"]
    runs.finish(runs.start([*settings, "optimizer.lr=0.01"], 1, log), log)
    given = {f"grid/{run.id}": tmp_path / "alone"}
    rows = {row.label: row for row in rows_of(target(measure="loss"), tmp_path, given)}
    filled = rows["geonorm, lr=0.01"]
    assert filled.ours == pytest.approx(runs.curve(tmp_path / "alone", "validation/loss")[8], rel=1e-6)
    assert filled.bits_per_byte == runs.curve(tmp_path / "alone", "validation/bits_per_byte")[8]
    differences, tokenizer = filled.remarks
    assert differences.startswith("other settings: ")
    assert "train.seed" in differences
    assert tokenizer == "other tokenizer"
    with pytest.raises(UserError, match="no run of the sweeps in"):
        main(["tables", "--out", str(tmp_path / "out"), "--run", "grid/unknown", str(tmp_path / "alone")])


def test_the_tables_of_the_repository_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tables", "--targets", str(REPOSITORY / "configs/paper/targets.yaml"), "--out", str(tmp_path)])
    page = (tmp_path / "tables.md").read_text()
    for figure in ("1.8792", "3.404 ", "3.1759", "3.2067", "16.81", "19.09"):
        assert figure in page
    assert (tmp_path / "tables.png").stat().st_size > 10_000
    assert "rows have runs of ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tables: []", "tables"),
        ("tables: [{title: a}]", "grid"),
        ("tables: [", "not valid YAML"),
    ],
)
def test_broken_targets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "targets.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_targets(tmp_path / "targets.yaml")


def test_a_figure_of_no_row_is_refused(tmp_path: Path) -> None:
    write_grid(tmp_path, content())
    with pytest.raises(UserError, match="theirs: keel is no row of stage rates"):
        rows_of(target(theirs={"keel": 1.0}), tmp_path, {})
    with pytest.raises(UserError, match="has no stage nothing"):
        rows_of(target(stage="nothing"), tmp_path, {})


def test_the_exponent_of_angles() -> None:
    falling = slope(7, [0.3 / math.sqrt(layer) for layer in range(1, 25)])
    assert (falling.step, falling.exponent, falling.inner) == (7, pytest.approx(-0.5), pytest.approx(-0.5))
    assert falling.ratio == pytest.approx(1)
    ends = slope(7, [5.0, *[0.1] * 8, 5.0])
    assert ends.inner == pytest.approx(0, abs=1e-9)
    assert math.isnan(slope(7, [0.3, 0.2, 0.1]).inner)


def test_spikes_stand_out_of_what_came_before() -> None:
    noise = np.random.default_rng(0).normal(size=300)
    losses = {step: 4 - 0.002 * step + 0.05 * float(noise[step]) for step in range(300)}
    assert spikes(losses) == []
    assert spikes(losses | {100: 6.0, 101: 5.5, 200: math.inf}) == [100, 101, 200]


def test_a_study_without_curves_leaves_the_page_as_it_was(tmp_path: Path) -> None:
    grid = load_grid(write_grid(tmp_path, content()))
    keep(grid, RATES.format("pre_norm", 0.1), 2.0)
    (grid.results_folder / "study.md").write_text("of earlier runs")
    with pytest.raises(UserError, match="no curves of a recorded run"):
        main(["study", str(grid.path)])
    assert (grid.results_folder / "study.md").read_text() == "of earlier runs"


def test_the_largest_rise_is_from_the_lowest_mean_to_a_later_one() -> None:
    falling = {step: 6 - 0.01 * step for step in range(100)}
    assert rise(falling) == pytest.approx(-0.08)  # to the next eight
    bumped = falling | dict.fromkeys(range(40, 48), 8.0)
    assert rise(bumped | {90: math.nan}) == pytest.approx(8 - (6 - 0.01 * 35.5))
    assert math.isnan(rise(dict.fromkeys(range(15), 5.0)))


def test_the_study_reads_whole_recorded_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = load_grid(write_grid(tmp_path, content()))
    for rate, steps in ((0.001, 18), (0.01, 5)):  # the second one's curves are not the recorded ones
        name = RATES.format("pre_norm", rate)
        keep(grid, name, 2.0, steps=18)
        with SummaryWriter(str(grid.run_dir(planned_run(grid, name, {}).run) / "tensorboard")) as writer:
            for step in range(1, steps + 1):
                writer.add_scalar("train/loss", 4.0 + 0.5 * (step > 10), step)
                writer.add_scalar("train/grad_norm", 1.5, step)
            for layer in range(1, 5):
                for sublayer in ("attention", "mlp"):
                    writer.add_scalar(f"geometry/angle_{sublayer}/layer_{layer:02d}", 0.3 / layer, 4)
    main(["study", str(grid.path)])
    page = (grid.results_folder / "study.md").read_text()
    main(["study", str(grid.path), "--out", str(tmp_path / "elsewhere")])
    assert (tmp_path / "elsewhere" / "study.md").read_text() == page
    assert "From the curves of 1 of 12 runs" in page
    assert "| pre_norm, lr=0.001 | 4 | attention | -1.00 | -1.00 | 2.0 |" in page
    assert "| pre_norm, lr=0.001 | 0 (1.5, +0.5) |" in page
    assert "lr=0.01 " not in page
    pictures = sorted(path.name for path in grid.results_folder.glob("*.png") if path.stat().st_size > 5_000)
    assert pictures == ["angles.png", "losses_rates.png"]
    assert f"{grid.results_folder / 'study.md'} and its pictures: from 1 of 12 runs" in capsys.readouterr().out
