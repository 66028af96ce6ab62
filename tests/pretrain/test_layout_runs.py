"""Runs through the command line in layouts that divide samples, layers and weights, against one process."""

import shutil
from pathlib import Path

import pytest

from tests.pretrain import runs

pytestmark = pytest.mark.dist

TAGS = ("train/loss", "train/grad_norm", "validation/loss", "geometry/angle_attention/layer_04")


def test_a_run_moves_from_context_parallel_ranks_to_virtual_stages(manifest: Path, tmp_path: Path) -> None:
    settings = ["model.num_layers=4", "train.precision=fp32", "train.steps=9", "data.separate_documents=true"]
    settings += [f"data.manifest={manifest}", "model.residual.scheme=proj"]
    log, alone, moved = tmp_path / "log", tmp_path / "alone", tmp_path / "moved"

    def train(folder: Path, world_size: int, *layout: str) -> None:
        runs.finish(runs.start([*settings, f"run.dir={folder}", *layout], world_size, log), log)

    train(alone, 1)
    train(moved, 2, "parallel.cp=2", "zero.stage=3")
    shutil.rmtree(moved / "checkpoints/step-00000009")
    shutil.rmtree(moved / "tensorboard")
    train(moved, 2, "parallel.pp=2", "parallel.vpp=2", "zero.stage=0")
    told = log.read_text()
    assert "tp 1 x pp 1 x cp 2 x dp 1, ZeRO-3, eager kernels on cpu" in told
    assert "tp 1 x pp 2 x vpp 2 x dp 1, ZeRO-0, eager kernels on cpu" in told
    assert "zero.stage: 3 -> 0" in told
    for tag in TAGS:
        expected = {step: value for step, value in runs.curve(alone, tag).items() if step > 6}
        assert expected
        assert runs.curve(moved, tag) == pytest.approx(expected, rel=1e-4), tag
