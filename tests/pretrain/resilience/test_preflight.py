"""Preflight on one node; over several see tests/slurm."""

from pathlib import Path

import pytest

from tests.launch import REPOSITORY, environment, free_port, template

pytestmark = pytest.mark.dist


def preflight(folder: Path, *settings: str) -> tuple[int, str]:
    """Exit status and output of one process."""
    out = folder / "out"
    arguments = ["preflight", str(REPOSITORY / "configs/geonorm_125m.yaml"), f"run.dir={folder / 'run'}", *settings]
    process = template().start("pretrain", arguments, environment(0, 1, free_port()), out, out)
    return process.wait(60), out.read_text()


def test_it_tells_whether_the_disk_holds_all_checkpoints(tmp_path: Path) -> None:
    status, said = preflight(tmp_path, "checkpoint.keep_last=1", "model.vocab_size=32000")
    assert (status, "warning" in said) == (0, False), said
    status, said = preflight(tmp_path, "checkpoint.every=1", "train.steps=1000000", "model.vocab_size=32000")
    assert status == 0
    assert "warning: preflight: the run keeps 1000000 checkpoints of about 1." in said
    assert "set checkpoint.keep_last" in said


def test_it_refuses_a_disk_that_holds_no_two_checkpoints(tmp_path: Path) -> None:
    status, said = preflight(tmp_path, "model.num_layers=100000", "model.vocab_size=32000")
    assert status == 2
    assert "error: preflight: " in said
    assert "GB free" in said
    assert "Traceback" not in said
