"""What `model.kernels` comes to in a run."""

import shutil
from pathlib import Path

import pytest
import yaml

from megatron_ext import kernels
from pretrain.config_file import load_config
from pretrain.errors import UserError
from pretrain.kernels import with_kernels
from tests.launch import REPOSITORY
from tests.pretrain import runs


def settled(choice: str) -> str:
    config = load_config(REPOSITORY / "configs/demo.yaml", [f"model.kernels={choice}"])
    return with_kernels(config, loud=True).model.kernels


def test_the_choice_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert settled("auto") == settled("eager") == "eager"
    assert capsys.readouterr().out == ""


def test_a_choice_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"^model.kernels=triton: .*; set auto, compiled or eager$"):
        settled("triton")
    monkeypatch.setattr(kernels, "_why_not_compile", lambda device_type: "no compiler")
    assert settled("compiled") == "eager"
    said = "warning: model.kernels=compiled: torch.compile does not work here (no compiler); eager is used instead\n"
    assert capsys.readouterr().out == said


@pytest.mark.dist
@pytest.mark.slow
def test_compiled_ranks_start_at_once_and_resume_bit_for_bit(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensor-parallel ranks compile into the same empty cache; a restart meets evaluation before training."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def train(folder: Path) -> str:
        settings = [f"data.manifest={manifest}", f"run.dir={folder}", "train.steps=9", "parallel.tp=2"]
        settings += ["model.kernels=compiled", "logging.every=1", "model.residual.scheme=proj"]
        log = folder.with_suffix(".log")
        runs.finish(runs.start([*settings, "optimizer.warmup_steps=2"], 2, log), log, timeout=400)
        return log.read_text()

    assert "compiled kernels on cpu" in train(whole)
    assert yaml.safe_load((whole / "config.yaml").read_text())["model"]["kernels"] == "compiled"
    shutil.copytree(whole, cut)
    for step in (6, 9):
        shutil.rmtree(cut / "checkpoints" / f"step-{step:08}")
    shutil.rmtree(cut / "tensorboard")
    assert "resumed from" in train(cut)
    resumed = runs.curve(cut, "train/loss")
    assert sorted(resumed) == [4, 5, 6, 7, 8, 9]
    expected = runs.curve(whole, "train/loss")
    assert resumed == {step: expected[step] for step in resumed}
