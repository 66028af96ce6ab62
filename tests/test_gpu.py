"""The same code on an NVIDIA GPU. Marked `gpu`: run by `tools/test.sh slow` where CUDA is, else counted as NOT RUN.

What the GPU tests call is tried on the CPU by a test beside them, so that a machine with a GPU finds no typing mistake.
"""

import os
from pathlib import Path

import pytest
import torch

from megatron_ext import exponential_step
from tests.pretrain import runs
from tests.pretrain.test_cli import command, run


def losses(manifest: Path, folder: Path, visible_gpus: str, *settings: str) -> dict[int, float]:
    """Train 8 steps alone on what CUDA shows, then two more from the checkpoint."""
    variables = {"CUDA_VISIBLE_DEVICES": visible_gpus, "DS_ACCELERATOR": "cuda" if visible_gpus else "cpu"}
    for steps in (8, 10):
        overrides = [f"data.manifest={manifest}", f"run.dir={folder}", f"train.steps={steps}", *settings]
        done = run(command(*overrides), **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"on {'cuda' if visible_gpus else 'cpu'}" in done.stdout
    return runs.curve(folder, "train/loss")


def retraction_error(device: str, dtype: torch.dtype) -> float:
    """Largest relative error of the step's output and gradients against fp64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    state, update, grad = (torch.randn(64, 256, generator=generator).to(dtype) for _ in range(3))

    def outcome(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        x, u = (tensor.detach().clone().to(device, dtype).requires_grad_() for tensor in (state, update))
        y = exponential_step(x, u, 0.5, 1.5)
        y.backward(grad.to(device, dtype))
        return [tensor.detach().cpu().double() for tensor in (y, x.grad, u.grad) if tensor is not None]

    pairs = zip(outcome(device, dtype), outcome("cpu", torch.float64), strict=True)
    return max(float((got - expected).norm() / expected.norm()) for got, expected in pairs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_retraction_as_the_gpu_test_calls_it(dtype: torch.dtype, limit: float) -> None:
    assert retraction_error("cpu", dtype) < limit


@pytest.mark.dist
def test_training_as_the_gpu_test_calls_it(manifest: Path, tmp_path: Path) -> None:
    assert len(losses(manifest, tmp_path / "run", "")) == 10


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_retraction_on_the_gpu(dtype: torch.dtype, limit: float) -> None:
    assert retraction_error("cuda", dtype) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_a_gpu_trains_and_resumes_as_the_cpu(manifest: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    setting = f"train.precision={precision}"
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_gpu = losses(manifest, tmp_path / "gpu", gpu, setting)
    assert on_gpu == pytest.approx(losses(manifest, tmp_path / "cpu", "", setting), rel=tolerance)
