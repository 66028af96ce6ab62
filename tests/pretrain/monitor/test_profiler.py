"""The window of the profiler in a real run; memory snapshots need a GPU."""

import gzip
import json
from pathlib import Path

import pytest

from tests.pretrain import runs


@pytest.mark.dist
def test_a_window_is_traced_on_the_chosen_ranks(manifest: Path, tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    settings = [f"data.manifest={manifest}", f"run.dir={run}", "train.steps=5"]
    settings += ["profile.window=2", "profile.first=3", "profile.global_ranks=[1]", "profile.memory=true"]
    runs.finish(runs.start(settings, 2, log), log)
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "step-00000004-global-rank-1.json.gz"
    traced = [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in traced) == 2
    assert log.read_text().count("warning: profile.memory=true watches a GPU's memory, and there is none") == 1
