import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from pretrain.errors import UserError
from pretrain.monitor.tags import BY_TOKENS
from tests.tools.written_runs import LAYERS, TOKENS_A_STEP, write_run
from tools.report.__main__ import main
from tools.report.figure import smoothed, thinned
from tools.report.reading import Curve, read_runs


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / "calm"), write_run(folder / "spiky", spike=60, lr=4e-3, broken=80)]


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.report", *map(str, arguments)])
    main()


class Links(HTMLParser):
    """Whatever a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = ("src", "href", "xlink:href", "data", "srcset")
        self.found += [value or "" for name, value in attributes if name in names]


def test_one_page_that_needs_nothing_else(
    two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report(monkeypatch, *two_runs, "--out", tmp_path / "both.html", "--axis", "hours")
    assert capsys.readouterr().out.split() == [str(tmp_path / "both.html"), str(tmp_path / "both.png")]
    page = (tmp_path / "both.html").read_text()
    links = Links()
    links.feed(page)
    assert [link for link in links.found if not link.startswith("#")] == []
    assert "@import" not in page
    assert "url(http" not in page
    cells = [re.findall(r"<td>(.*?)</td>", line) for line in page.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["steps"] == ["100", "100"]
    assert rows["tokens"] == ["100,000", "100,000"]
    assert rows["hours of training"] == ["0.99", "0.99"]
    assert rows["spikes"] == ["0", "1"]
    assert rows["steps not finite"] == ["0", "1"]
    assert rows["optimizer.lr"] == ["0.001", "0.004"]
    assert rows["MFU, median"] == ["0.400", "0.400"]
    assert "run.dir" not in rows
    assert "spiky, step 60: spike_report" in page
    assert "loss &lt;5.47&gt; &amp; more" in page
    height, width, _ = imread(tmp_path / "both.png").shape
    assert width > 1000
    assert height > 1000


def test_what_is_read_is_what_was_written(two_runs: list[Path]) -> None:
    calm, spiky = read_runs(two_runs, "tokens")
    assert (calm.name, spiky.name) == ("calm", "spiky")
    assert calm.num_layers == LAYERS
    assert spiky.curve("events/spike").steps.tolist() == [60]
    assert [curve.values[-1] for curve in calm.layers("geometry/resultant_length")] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], rel=1e-6
    )
    assert calm.along(np.array([10.0, 55.5]), "tokens").tolist() == [10_000, 55_500]
    assert calm.along(np.array([1.0, 101.0]), "hours").tolist() == pytest.approx([0, 0.99])
    assert calm.along(np.array([7.0]), "steps").tolist() == [7]


@pytest.mark.parametrize("cut", ["tensorboard", f"tensorboard/{BY_TOKENS}"])
def test_a_file_cut_off_by_a_kill_is_read_up_to_there(cut: str, tmp_path: Path) -> None:
    """Or by our looking at it while the run goes on; the clock is that of the steps that both files know."""
    run = write_run(tmp_path / "killed", broken=5)
    (file,) = (run / cut).glob("*tfevents*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (killed,) = read_runs([run], "tokens")
    steps = killed.curve("train/loss").steps
    assert 10 < len(killed.clock) < 100
    assert len(steps) == (len(killed.clock) if cut == "tensorboard" else 100)
    assert killed.along(np.array([7.0]), "tokens").tolist() == [7 * TOKENS_A_STEP]


def test_a_clock_of_other_points_is_none(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", spike=3)
    (mine,), (theirs,) = ((path / "tensorboard" / BY_TOKENS).glob("*tfevents*") for path in (run, other))
    mine.write_bytes(theirs.read_bytes())
    (found,) = read_runs([run], "steps")
    assert len(found.clock) == 0


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / parent / "run", steps=3) for parent in ("first", "second")]
    assert [run.name for run in read_runs(paths, "steps")] == ["first/run", "second/run"]


def damaged(folder: Path) -> Path:
    run = write_run(folder, steps=30)
    (file,) = (run / "tensorboard").glob("*tfevents*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    return run


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def odd_settings(folder: Path) -> Path:
    run = write_run(folder, steps=3)
    (run / "config.yaml").write_text("a: [")
    return run


def strange(folder: Path) -> Path:
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "events.out.tfevents.1.a").write_bytes(b"no events here" * 100)
    return folder


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda folder: folder, "is no folder"),
        (empty, "has no TensorBoard files"),
        (strange, "run"),
        (odd_settings, "config.yaml cannot be read"),
    ],
    ids=["absent", "empty", "strange", "odd settings"],
)
def test_what_is_no_run_gets_one_line(make: object, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line) as raised:
        read_runs([make(tmp_path / "run")], "steps")  # type: ignore[operator]
    assert "\n" not in str(raised.value)


def test_a_damaged_file_is_read_up_to_the_damage(tmp_path: Path) -> None:
    run = damaged(tmp_path / "run")
    (found,) = read_runs([run], "steps")
    assert 0 < len(found.curve("train/loss").steps) < 30


def test_mistakes_on_the_command_line(two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="name a file in a folder that exists"):
        report(monkeypatch, two_runs[0], "--out", tmp_path / "nowhere" / "report")
    with pytest.raises(UserError, match="named twice"):
        report(monkeypatch, two_runs[0], two_runs[0], "--out", tmp_path / "report")
    (tmp_path / "bare").mkdir()
    for file in (two_runs[0] / "tensorboard").glob("*tfevents*"):
        (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="no record of tokens"):
        report(monkeypatch, tmp_path / "bare", "--axis", "tokens", "--out", tmp_path / "report")


def test_thinning_keeps_every_spike() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[[777, 50_001]] = 40, -40
    thin_x, thin_y = thinned(x, y, 200)
    assert len(thin_x) <= 200
    assert {777.0, 50_001.0} <= set(thin_x)
    assert np.array_equal(y[thin_x.astype(int)], thin_y)
    assert thinned(x[:5], y[:5], 200)[0] is not None


def test_smoothing_is_a_mean_of_what_came_before() -> None:
    curve = smoothed(Curve(np.arange(6.0), np.array([0.0, 2, 4, 6, 8, 10])), share=0.5)
    assert curve.values.tolist() == [0, 1, 2, 4, 6, 8]
