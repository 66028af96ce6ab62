"""Real runs whose shards lie on a server that fails: the same losses, or one line on all ranks."""

import os
from pathlib import Path

import pytest

from pretrain.data.manifest import Manifest
from tests.pretrain import runs
from tests.servers.fault_proxy import fault_proxy
from tests.servers.http import http_server
from tests.servers.s3 import BUCKET, S3Server, variables

pytestmark = pytest.mark.dist

SETTINGS = ["train.steps=6", "train.precision=fp32", "checkpoint.every=0"]


def train(place: str, folder: Path, *settings: str) -> list[int]:
    """Two data-parallel ranks; their exit statuses."""
    log = folder.with_suffix(".log")
    processes = runs.start([*SETTINGS, f"data.manifest={place}", f"run.dir={folder}", *settings], 2, log)
    try:
        return [process.wait(180) for process in processes]
    finally:
        runs.kill(processes)


def test_losses_are_those_of_the_local_run(
    manifest: Manifest, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(str(manifest.directory / "manifest.json"), tmp_path / "local") == [0, 0]
    s3.upload(manifest.directory, "training")
    with fault_proxy(s3.port) as (port, faults):
        for name, value in variables(port).items():
            monkeypatch.setenv(name, value)
        faults.kind, faults.times, faults.after_bytes = "reset+truncate+unavailable+flip", 7, 2_000
        faults.only = b"/small-"  # nothing tells what the content of a manifest should be
        statuses = train(
            f"s3://{BUCKET}/training/manifest.json",
            tmp_path / "remote",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.source_timeout_minutes=0.5",
        )
        assert statuses == [0, 0], (tmp_path / "remote.log").read_text()
        assert faults.hit == 7
    for tag in ("train/loss", "train/grad_norm", "validation/loss"):
        assert runs.curve(tmp_path / "remote", tag) == runs.curve(tmp_path / "local", tag)
    recorded = (tmp_path / "remote" / "config.yaml").read_text() + (tmp_path / "remote.log").read_text()
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in recorded


@pytest.mark.parametrize("fault", ["away", "gone"])
def test_a_source_that_fails_for_good_ends_all_ranks_with_one_line(own_copy: Path, tmp_path: Path, fault: str) -> None:
    if fault == "gone":
        for file in own_copy.glob("*-train-*.tar"):
            file.unlink()
    with http_server(own_copy) as server, fault_proxy(server.port) as (port, faults):
        faults.kind, faults.only = "unavailable" if fault == "away" else "none", b".tar"
        statuses = train(
            f"http://user:secret@127.0.0.1:{port}/manifest.json?sig=secret",
            tmp_path / "run",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.source_timeout_minutes=0.05",
            "validation.every=0",
        )
    assert statuses == [2, 2]
    log = (tmp_path / "run.log").read_text()
    (line,) = [line for line in log.splitlines() if "error" in line.lower()]
    assert line.startswith(f"error: http://127.0.0.1:{port}/small-train-")
    assert ("nothing arrived for 0.05 minutes (503" if fault == "away" else "the server answers 404") in line
    assert "Traceback" not in log
    assert "secret" not in log + (tmp_path / "run" / "config.yaml").read_text()
