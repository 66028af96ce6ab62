"""The README's scheme of one's own: that very file and line, trained by two tensor-parallel ranks."""

import re
import shutil
from pathlib import Path

import pytest

from tests.launch import REPOSITORY
from tests.pretrain import runs

pytestmark = pytest.mark.dist
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def example() -> str:
    (text,) = re.findall(r"here `fading\.py`:\n\n```python\n(.*?)```", README, re.DOTALL)
    return str(text)


def test_it_is_short() -> None:
    assert len(example().splitlines()) < 40


def test_one_file_and_one_line_train_in_any_layout(manifest: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r'and one line, `("fading",)`', README)
    for package in ("megatron_ext", "pretrain"):
        shutil.copytree(REPOSITORY / package, tmp_path / package)
    (tmp_path / "megatron_ext/schemes/fading.py").write_text(example(), encoding="utf-8")
    registry = tmp_path / "megatron_ext/schemes/__init__.py"
    registry.write_text(registry.read_text().replace("_FILES = (\n", f"_FILES = (\n    {line}\n"), encoding="utf-8")
    divided = trained(tmp_path, manifest, "divided", "parallel.tp=2", "parallel.sp=true")
    whole = trained(tmp_path, manifest, "whole", "parallel.tp=1")
    assert list(divided.values()) == pytest.approx(list(whole.values()), rel=1e-5)


def trained(source: Path, manifest: Path, name: str, *layout: str) -> dict[int, float]:
    """The losses of a run with the scheme on two processes."""
    run, log = source / name, source / f"{name}.log"
    settings = [f"run.dir={run}", f"data.manifest={manifest}", "model.residual.scheme=fading", "train.precision=fp32"]
    runs.finish(runs.start([*settings, *layout, "train.steps=8", "logging.every=1"], 2, log, source=source), log)
    assert log.read_text().startswith("fading: ")
    losses = runs.curve(run, "train/loss")
    assert len(losses) == 8
    return losses
