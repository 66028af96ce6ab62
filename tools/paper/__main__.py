"""The papers' runs beside ours: ``tables`` collects finished runs, ``study`` reads angles and spikes off a sweep."""

import argparse
from pathlib import Path

from pretrain.data.files import write_atomically
from pretrain.errors import UserError, run_cli
from tools.paper.rows import rows_of
from tools.paper.study import recorded_runs, study_text
from tools.paper.study_plot import draw_angles, draw_losses
from tools.paper.tables import draw, tables_text
from tools.paper.targets import load_targets
from tools.sweep.grid import load_grid

TARGETS = Path("configs/paper/targets.yaml")


def make_tables(targets: Path, out: Path, given: dict[str, Path]) -> None:
    """Write ``tables.md`` and ``tables.png`` into ``out``.

    Raises:
        UserError: for whatever the user can mend.
    """
    wanted = load_targets(targets)
    known = {
        f"{grid.path.stem}/{run.id}"
        for path in dict.fromkeys(target.grid for target in wanted)
        if (grid := load_grid(targets.parent / path))
        for run in grid.runs
    }
    if strangers := set(given) - known:
        raise UserError(f"--run {min(strangers)}: no run of the sweeps in {targets}; python -m tools.sweep GRID --list")
    filled = [(target, rows_of(target, targets.parent, given)) for target in wanted]
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "tables.md", tables_text(filled).encode())
    draw(filled, out / "tables.png")
    count = sum(row.ours is not None for _, rows in filled for row in rows)
    print(f"{out / 'tables.md'}: {count} of {sum(len(rows) for _, rows in filled)} rows have runs of ours")


def make_study(path: Path, out: Path | None) -> None:
    """Write ``study.md``, ``angles.png`` and each stage's ``losses_STAGE.png`` into ``out``, or beside the results.

    Raises:
        UserError: for whatever the user can mend.
    """
    grid = load_grid(path)
    there = recorded_runs(grid)
    if not there:  # what an earlier study wrote stays
        raise UserError(f"{path}: no curves of a recorded run are in {grid.file.work}: they stay where the sweep ran")
    folder = out or grid.results_folder
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "study.md", study_text(grid, there).encode())
    draw_angles(grid, there, folder / "angles.png")
    for stage in dict.fromkeys(run.stage for run in there):
        draw_losses(grid, there, stage, folder / f"losses_{stage}.png")
    print(f"{folder / 'study.md'} and its pictures: from {len(there)} of {len(grid.runs)} runs")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.paper", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tables = commands.add_parser("tables", help="the papers' tables with our runs beside their figures")
    tables.add_argument("--targets", type=Path, default=TARGETS, metavar="FILE", help="default: %(default)s")
    tables.add_argument("--out", type=Path, metavar="DIR", help="default: the folder of the targets")
    run = "a run that was started without the sweep: GRID/ID as the sweep names it, and its folder"
    tables.add_argument("--run", nargs=2, action="append", default=[], metavar=("GRID/ID", "DIR"), help=run)
    study = commands.add_parser("study", help="angles over depth and spikes of a sweep's runs")
    study.add_argument("grid", type=Path, metavar="GRID", help="for example configs/paper/study.yaml")
    study.add_argument("--out", type=Path, metavar="DIR", help="default: the folder of the sweep's results")
    options = parser.parse_args(arguments)
    if options.command == "study":
        make_study(options.grid, options.out)
    else:
        given = {name: Path(folder) for name, folder in options.run}
        make_tables(options.targets, options.out or options.targets.parent, given)


if __name__ == "__main__":
    run_cli(main)
