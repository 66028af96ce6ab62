"""A pytest plugin for ``tools/test.sh``: tests of several processes come last, and no test is left out unsaid."""

from collections import Counter
from collections.abc import Sequence

import pytest

_MARKERS = ("slow", "gpu")
_deselected: Counter[str] = Counter()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first: their failures are the easiest to read."""
    items.sort(key=lambda item: item.get_closest_marker("dist") is not None)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what a marker expression left out."""
    for marker in _MARKERS:
        _deselected[marker] += sum(item.get_closest_marker(marker) is not None for item in items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of each marker were not run."""
    counts = ", ".join(f"{marker} {_deselected[marker]}" for marker in _MARKERS)
    terminalreporter.write_line(f"deselected (NOT RUN): {counts}")
