"""Runs of two ranks that fail to save, meet damage and attacks, and go on; the checks stand in the worker."""

from pathlib import Path

import pytest

from tests.launch import launch
from tests.pretrain import runs

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    outputs = launch("tests.pretrain.checkpoint.runs_worker", 2, str(manifest), str(folder), timeout=600)
    assert [output.splitlines()[-1] for output in outputs] == ["all checks passed"] * 2
    (folder / "log").write_text(outputs[0])
    return folder


@pytest.mark.parametrize("name", ["damaged", "record", "common", "goes_on", "at_once_goes_on"])
def test_they_go_on_bit_for_bit(folder: Path, name: str) -> None:
    """Dropout included; a run that met no damage goes on from step 2 as well."""
    for tag in ("train/loss", "train/grad_norm"):
        whole = runs.curve(folder / "whole", tag)
        assert runs.curve(folder / name, tag) == {step: whole[step] for step in range(3, 9)}, tag


def test_each_is_told_in_one_line(folder: Path) -> None:
    log = (folder / "log").read_text()
    damaged = folder / "damaged/checkpoints/step-00000004"
    assert f"warning: {damaged} is damaged: __1_0.distcp has the crc32 " in log
    assert "; kept as step-00000004.damaged\n" in log
    for step in (4, 6, 8):
        failed = f"warning: the checkpoint of step {step} could not be written to {folder}/goes_on/checkpoints: "
        assert f"{failed}File too large; training goes on\n" in log
