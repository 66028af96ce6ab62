"""What a benchmark hands back, and how a table of it is set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """The outcome of one benchmark.

    Attributes:
        text: for people: a table and what has to be known to read it.
        results: the same and every single timing, as JSON values.
        settings: what was run, as JSON values.
        failed: whether a check failed that others went on after; the exit status then is 1.
    """

    text: str
    results: dict[str, Any]
    settings: dict[str, Any]
    failed: bool = False


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is set flush left, the others flush right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
