"""``python -m tools.report RUN... [--out NAME] [--axis steps|tokens|hours]`` writes NAME.html and NAME.png."""

import argparse
from pathlib import Path

from pretrain.data.files import write_atomically
from pretrain.errors import UserError, run_cli
from tools.report.reading import AXES, read_runs


def main() -> None:
    """Read the runs, draw, write both files."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description="Compare runs on one page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (run.dir)")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="NAME", help="default: report")
    parser.add_argument("--axis", choices=AXES, default="steps", help="of the curves (default %(default)s)")
    given = parser.parse_args()
    out = given.out.with_suffix("") if given.out.suffix in (".html", ".png") else given.out
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {given.out}: name a file in a folder that exists")
    runs = read_runs(given.runs, given.axis)

    from tools.picture import as_png  # matplotlib takes a second
    from tools.report.figure import as_svg, draw
    from tools.report.page import render

    figure = draw(runs, given.axis)
    page, picture = (out.with_name(out.name + suffix) for suffix in (".html", ".png"))
    try:
        write_atomically(page, render(runs, as_svg(figure)).encode())
        write_atomically(picture, as_png(figure, 90))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    print(f"{page}\n{picture}")


if __name__ == "__main__":
    run_cli(main)
