"""What a user sees: TensorBoard's pages of a run, and the report, drawn by Chromium."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.layout import first_page
from tests.browser.conftest import SPIKE
from tests.tools.written_runs import LAYERS
from tools.report.__main__ import main

pytestmark = pytest.mark.browser

CARD = "tf-custom-scalar-multi-line-chart-card"
SYMBOLS = """
card => {
    const all = root => [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
    const middle = e => { const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; };
    const found = all(card.shadowRoot || card);
    const top = Math.min(...found.filter(e => e.matches('path.line')).map(e => e.getBoundingClientRect().y));
    const frame = found.find(e => e.matches('.main')).getBoundingClientRect();
    return {
        top: top,
        frame: [frame.x, frame.y, frame.right, frame.bottom],
        symbols: found.filter(e => e.matches('path.symbol')).map(middle),
    };
}
"""
"""Of a chart: the highest point of its lines, its frame, and the places of all marks, in pixels."""


def test_the_first_page_is_drawn_and_the_spike_stands_out(page: Any, tensorboard: str) -> None:
    page.goto(f"{tensorboard}/#custom_scalars&_smoothingWeight=0")
    charts = first_page(LAYERS, has_mfu=True)
    cards = page.locator(CARD)
    for number, (title, tags) in enumerate(charts.items()):
        card = cards.nth(number)
        assert card.locator(".heading-label").first.text_content().strip() == title
        lines = card.locator("path.line[d]")
        lines.first.wait_for(state="attached")
        assert all(len(line.get_attribute("d")) > 50 for line in lines.all()), (title, tags)
    page.get_by_text("Ignore outliers in chart scaling").click()  # they are what is looked for
    page.wait_for_timeout(2000)
    seen = cards.first.evaluate(SYMBOLS)
    left, upper, right, lower = seen["frame"]
    assert upper < seen["top"] < lower
    at_the_top = {round(x) for x, y in seen["symbols"] if abs(y - seen["top"]) < 6}
    assert len(at_the_top) == 1, seen  # of the curve itself only some points are marked, and this is none of them
    # The axis begins a little before the first step and ends a little behind the last.
    assert (at_the_top.pop() - left) / (right - left) == pytest.approx(SPIKE / 100, abs=0.1)


def test_the_time_series_are_drawn(page: Any, tensorboard: str) -> None:
    page.goto(f"{tensorboard}/?tagFilter=train#timeseries")
    page.locator("scalar-card line-chart svg path").first.wait_for(state="attached")
    titles = page.locator("scalar-card").all_inner_texts()
    assert any("loss_by_tokens" in title for title in titles)


def test_the_report_of_a_spike_is_read(page: Any, tensorboard: str) -> None:
    page.goto(f"{tensorboard}/#text")
    page.get_by_text("spike_report").first.wait_for()


def test_settings_are_compared(page: Any, tensorboard: str) -> None:
    page.goto(f"{tensorboard}/#hparams")
    for text in ("optimizer.lr", "0.0040000", "calm/tensorboard"):
        page.get_by_text(text).first.wait_for()


def test_the_page_without_tensorboard(
    page: Any, written: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.report", *map(str, written), "--out", str(tmp_path / "report")])
    main()
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("svg").first.bounding_box()["width"] > 1000
    assert page.locator("td", has_text="optimizer.lr").is_visible()
    page.get_by_text("spike_report").click()
    assert page.locator("pre", has_text="& more").is_visible()
