"""The papers' tables with our figures beside theirs, as Markdown and as one picture."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from pretrain.data.files import write_atomically
from tools.paper.rows import Row
from tools.paper.targets import Target
from tools.picture import as_png

mpl.use("Agg")

_LEGEND = """\
Theirs: the papers' figure, where we know one. Ours: our finished runs, mean over seeds; an empty cell where nothing ran
to its end. Losses (nats per token) and perplexities of different tokenizers cannot be compared, so such rows say
`other tokenizer`; bits per byte can. What the papers leave open (steps, batch, rates and more) is ours: the sweeps in
this folder mark it."""


def tables_text(filled: Sequence[tuple[Target, Sequence[Row]]]) -> str:
    """The whole page."""
    return "\n\n".join(["# The papers' runs", _LEGEND, *(_table(target, rows) for target, rows in filled)]) + "\n"


def _table(target: Target, rows: Sequence[Row]) -> str:
    measure = "validation loss" if target.measure == "loss" else "validation perplexity"
    head = ["", f"theirs: {measure}", "ours", "bits per byte", "tokens", "remarks"]
    lines = [head, ["---", "---:", "---:", "---:", "---:", "---"]]
    for row in rows:
        spread = "" if row.spread is None else f" ± {row.spread:.4f}"
        lines.append(
            [
                row.label,
                "" if row.theirs is None else f"{row.theirs:g}",
                "" if row.ours is None else f"{row.ours:.4f}{spread}",
                "" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
                f"{row.tokens / 1e9:.2f} B",
                "; ".join(row.remarks),
            ]
        )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"## {target.title}\n\nThe paper says: {target.said}. Runs: `{target.grid}`, stage `{target.stage}`.\n\n{text}"
    )


def draw(filled: Sequence[tuple[Target, Sequence[Row]]], path: Path) -> None:
    """Write ``path`` as PNG: a panel a table, theirs beside ours."""
    columns = 3
    count = math.ceil(len(filled) / columns)
    figure = Figure(figsize=(6 * columns, 2.8 * count), layout="constrained")
    panels = figure.subplots(count, columns, squeeze=False).ravel()
    for axes, (target, rows) in zip(panels, filled, strict=False):
        places = range(len(rows))
        for values, marker, colour, label in (
            ([row.theirs for row in rows], "D", "#cc3311", "theirs"),
            ([row.ours for row in rows], "o", "#0077bb", "ours"),
        ):
            known = [(value, place) for value, place in zip(values, places, strict=True) if value is not None]
            axes.plot(*(zip(*known, strict=True) if known else ([], [])), marker, color=colour, label=label)
        axes.set_yticks(list(places), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(target.title, fontsize=9)
        axes.set_xlabel(target.measure)
        axes.grid(alpha=0.3)
    for axes in panels[len(filled) :]:
        axes.set_axis_off()
    panels[0].legend()
    write_atomically(path, as_png(figure, 70))
