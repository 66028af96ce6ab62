"""Real runs of two ranks that are told to stop, save and evaluate, and go on with the losses of one that was not."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain import runs

pytestmark = pytest.mark.dist

STEADY = [
    *("optimizer.lr=0.002", "optimizer.min_lr=0.002", "checkpoint.every=0", "logging.every=1"),
    *("train.micro_batch=1", "validation.every=6", "validation.samples=120"),
]


class Run:
    """A run, started again and again."""

    def __init__(self, manifest: Path, folder: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        self._settings = [f"data.manifest={manifest}", f"run.dir={folder}", *STEADY]
        self.ranks: list[Any] = []
        self._seen = 0

    def start(self, steps: int = 1_000_000) -> None:
        self._seen = len(self.text())
        self.ranks = list(runs.start([*self._settings, f"train.steps={steps}"], 2, self.log))

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def this_launch(self) -> str:
        return self.text()[self._seen :]

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.this_launch():
            assert time.monotonic() < deadline, self.text()
            assert all(rank.poll() is None for rank in self.ranks), self.text()
            time.sleep(0.005)

    def statuses(self) -> list[int]:
        try:
            return [rank.wait(120) for rank in self.ranks]
        finally:
            runs.kill(self.ranks)

    def ends(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("launches/*/end.json"))]


def test_told_runs_go_on_bit_for_bit(manifest: Path, tmp_path: Path) -> None:
    run = Run(manifest, tmp_path / "told")

    # A signal to one rank, in the midst of an evaluation, which is left.
    run.start()
    run.wait_for("step 6/1000000  loss ")
    os.kill(run.ranks[1].pid, signal.SIGUSR1)
    assert run.statuses() == [75, 75]
    assert "validation loss" not in run.this_launch()
    assert [path.name for path in run.folder.glob("checkpoints/*")] == ["step-00000006"]

    # What was left is made up for. Wishes are fulfilled; an interrupt ends it.
    run.start()
    run.wait_for("step 6/1000000  validation loss ")
    run.wait_for("step 9/1000000  loss ")
    (run.folder / "evaluate").touch()
    run.wait_for("evaluate: done at step ")
    (run.folder / "save").touch()
    run.wait_for("save: done at step ")
    saved = sorted(run.folder.glob("checkpoints/step-*"))[-1]
    assert f"save: done at step {int(saved.name[5:])}\n" in run.this_launch()
    os.kill(run.ranks[0].pid, signal.SIGINT)
    assert run.statuses() == [130, 130]
    assert run.this_launch().count("stopping after this step") == 1

    run.start()
    run.wait_for("resumed from")
    (run.folder / "stop").touch()
    assert run.statuses() == [0, 0]
    assert not [name for name in ("save", "stop", "evaluate") if (run.folder / name).exists()]
    ends = run.ends()
    assert [end["reason"] for end in ends] == ["a signal to another rank", "SIGINT", "told to stop by the file stop"]

    plain = Run(manifest, tmp_path / "plain")
    plain.start(ends[-1]["step"])
    assert plain.statuses() == [0, 0], plain.text()
    for tag in ("train/loss", "train/grad_norm"):
        assert runs.curve(run.folder, tag) == runs.curve(plain.folder, tag), tag
    told, expected = runs.curve(run.folder, "validation/loss"), runs.curve(plain.folder, "validation/loss")
    regular = {step: loss for step, loss in expected.items() if step % 6 == 0 and step < ends[-1]["step"]}
    assert {step: told[step] for step in regular} == regular
    wished = re.findall(r"evaluate: done at step (\d+)", run.text())
    assert [int(step) in told for step in wished] == [True]
    assert min(runs.curve(plain.folder, "throughput/slowest_rank").values()) >= 1


def test_a_rank_whose_peer_died_ends_by_itself(manifest: Path, tmp_path: Path) -> None:
    run = Run(manifest, tmp_path / "run")
    run.start()
    run.wait_for("step 2/1000000  loss ")
    os.kill(run.ranks[1].pid, signal.SIGKILL)
    status, killed = run.statuses()
    assert killed == -signal.SIGKILL
    assert status == 1
    assert "Traceback" in run.this_launch()
