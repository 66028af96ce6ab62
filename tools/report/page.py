"""A report as one page of HTML that needs nothing else, on any disk or in any mail."""

import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from tools.report.reading import RunRecord, last

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1250px; padding: 0 1em; color: #1a1a1a; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: 0.25em 0.7em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
pre { background: #f4f4f4; padding: 0.7em; overflow-x: auto; white-space: pre-wrap; }
summary { cursor: pointer; }
"""

FACTS: Mapping[str, Callable[[RunRecord], str]] = {
    "steps": lambda run: f"{run.curve('train/loss').steps[-1]:,.0f}",
    "tokens": lambda run: f"{run.clock[-1, 1]:,.0f}" if len(run.clock) else "-",
    "hours of training": lambda run: f"{run.clock[-1, 2]:.2f}" if len(run.clock) else "-",
    "training loss, mean of the last 2 %": lambda run: _number(_final_loss(run)),
    "validation loss, last": lambda run: _number(last(run.curve("validation/loss"))),
    "validation loss, lowest": lambda run: _number(min(run.curve("validation/loss").finite.values, default=math.nan)),
    "spikes": lambda run: f"{len(run.curve('events/spike').steps)}",
    "steps not finite": lambda run: f"{_not_finite(run)}",
    "tokens per second, median": lambda run: _number(_median(run, "throughput/tokens_per_second"), ",.0f"),
    "model TFLOP/s per GPU, median": lambda run: _number(_median(run, "throughput/model_tflops_per_gpu"), ".4g"),
    "MFU, median": lambda run: _number(_median(run, "throughput/mfu"), ".3f"),
}
"""What the first table tells of each run."""


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Setting -> its value in each run, for those that are not the same in all; absent ones are a dash."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name, "-") for run in runs] for name in names if name != "run.dir"}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def render(runs: Sequence[RunRecord], charts: str) -> str:
    """The page; ``charts`` is an element <svg>."""
    title = "Runs: " + ", ".join(run.name for run in runs)
    heads = [run.name for run in runs]
    facts = {name: [fact(run) for run in runs] for name, fact in FACTS.items()}
    settings = differing(runs)
    events = "\n".join(_event(run.name, *text) for run in runs for text in run.texts if text[0].startswith("events/"))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{_table(heads, facts)}
<h2>Settings that differ</h2>
{_table(heads, settings) if settings else "<p>None.</p>"}
<h2>Curves</h2>
{charts}
<h2>Events</h2>
{events or "<p>None.</p>"}
</body></html>
"""


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    body = "\n".join(line([name, *cells], "td") for name, cells in rows.items())
    return f"<table>{line(['', *heads], 'th')}\n{body}</table>"


def _event(run: str, tag: str, step: int, text: str) -> str:
    head = html.escape(f"{run}, step {step}: {tag.partition('/')[2]}")
    return f"<details><summary>{head}</summary><pre>{html.escape(text)}</pre></details>"


def _number(value: float, form: str = ".4f") -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _median(run: RunRecord, tag: str) -> float:
    values = run.curve(tag).finite.values
    return statistics.median(values) if len(values) else math.nan


def _final_loss(run: RunRecord) -> float:
    values = run.curve("train/loss").finite.values
    return float(values[-max(1, len(values) // 50) :].mean()) if len(values) else math.nan


def _not_finite(run: RunRecord) -> int:
    loss = run.curve("train/loss")
    return len(loss.values) - len(loss.finite.values)
