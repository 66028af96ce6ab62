"""``python -m tools.sweep GRID.yaml``: run what has no result yet; interrupt and start again as often as you like."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pretrain.data.files import write_atomically
from pretrain.data.manifest import Manifest
from pretrain.datasets import load_datasets
from pretrain.errors import UserError, run_cli
from pretrain.rules import check_data
from tools.arguments import positive_int
from tools.sweep.data import build_data, existing_data
from tools.sweep.grid import Grid, Run, load_grid
from tools.sweep.plan import State, plan
from tools.sweep.plot import draw
from tools.sweep.results import read_results, results_lock
from tools.sweep.runner import Sweep, is_held
from tools.sweep.table import table_text

TABLE_NAME = "table.md"
CURVES_NAME = "curves.png"


def write_report(grid: Grid, data: Manifest | None) -> None:
    """Make table and curves anew from the recorded results."""
    with results_lock(grid.results_folder):
        planned = plan(grid, read_results(grid.results_folder), data)
        write_atomically(grid.results_folder / TABLE_NAME, table_text(grid, planned).encode())
        draw(grid, planned, grid.results_folder / CURVES_NAME)


def list_runs(grid: Grid, data: Manifest | None, selected: Callable[[Run], bool]) -> None:
    """Print a line a run: its state, what is known of it, its id."""
    if data is None:
        print("data: not built yet, so that of the recorded results is not compared")
    for planned in plan(grid, read_results(grid.results_folder), data):
        if selected(planned.run):
            state = "running" if is_held(grid.folder(planned.run)) else planned.state
            detail = f"  ({planned.detail})" if planned.detail else ""
            print(f"{state:<9} {planned.run.id}{detail}")


def run_sweep(grid: Grid, jobs: int, selected: Callable[[Run], bool]) -> bool:
    """Run what is left of the selected runs; whether all of them have a result then."""
    data = build_data(grid)
    for run in grid.runs:
        try:
            config = grid.config(run, grid.first_candidates(run))
            check_data(config, load_datasets(config.data))
        except UserError as error:
            raise UserError(f"{grid.path}: run {run.id}: {error}") from None
    write_report(grid, data)
    left = [
        planned
        for planned in Sweep(grid, data, jobs, selected, lambda: write_report(grid, data)).work()
        if not planned.counts
    ]
    for planned in left:
        print(f"{planned.run.id}: {planned.state}: {planned.detail}")
    print(f"results: {grid.results_folder}")
    return all(planned.state == State.BLOCKED for planned in left)


def choose(grid: Grid, options: argparse.Namespace) -> Callable[[Run], bool]:
    """Which runs the command line asks for.

    Raises:
        UserError: there is no such run, or the part does not exist.
    """
    if options.run is not None:
        if options.run not in [run.id for run in grid.runs]:
            raise UserError(f"--run {options.run}: no run of {grid.path}; --list shows them")
        return lambda run: run.id == options.run
    if (options.index is None) != (options.of is None):
        raise UserError("--index and --of belong together: --index 0 --of 4 is the first of four parts")
    if options.of is None:
        return lambda run: True
    if not 0 <= options.index < options.of:
        raise UserError(f"--index {options.index} --of {options.of}: parts count from 0 to {options.of - 1}")
    # Whole variants: what a run takes from another stage is then within its own part.
    names = list(grid.file.variants)[options.index :: options.of]
    return lambda run: run.variant in names


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.sweep", description=__doc__)
    parser.add_argument("grid", type=Path, metavar="GRID", help="for example configs/paper/schemes_small.yaml")
    parser.add_argument("--jobs", type=positive_int, default=1, metavar="N", help="runs at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="show every run with its state, and run nothing")
    parser.add_argument("--report", action="store_true", help="make table and curves anew, and run nothing")
    parser.add_argument("--run", metavar="ID", help="this run alone")
    parser.add_argument("--index", type=int, metavar="I", help="part I, from 0, of --of parts, for a job array")
    parser.add_argument("--of", type=positive_int, metavar="N", help="number of parts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    grid = load_grid(options.grid)
    selected = choose(grid, options)
    if options.list:
        list_runs(grid, existing_data(grid), selected)
    elif options.report:
        write_report(grid, existing_data(grid))
        print(f"{grid.results_folder / TABLE_NAME} and {CURVES_NAME} are made anew")
    elif not run_sweep(grid, options.jobs, selected):
        sys.exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A batch system's request to end is an interrupt like the keyboard's."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_cli(main)
