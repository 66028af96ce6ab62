"""The same code on an NVIDIA GPU. Marked `gpu`: run by `tools/test.sh slow` where CUDA is, else counted as NOT RUN.

What the GPU tests call is tried on the CPU by a test beside them, so that a machine with a GPU finds no typing mistake.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_ext import SCHEMES, Retraction, find_documents, find_runs, own_part, retract
from megatron_ext.attention import attend_by_flash, attend_by_length, attend_runs_by_flash, flash_can_attend
from megatron_ext.context import attend_by_run
from tests.pretrain import runs
from tests.pretrain.test_cli import command, run

SCHEME_SETTINGS = [["scheme=p", "p=3"] if name == "p" else [f"scheme={name}"] for name in SCHEMES]


def losses(manifest: Path, folder: Path, visible_gpus: str, *settings: str) -> dict[int, float]:
    """Train 8 steps alone on what CUDA shows, then two more from the checkpoint."""
    variables = {"CUDA_VISIBLE_DEVICES": visible_gpus, "DS_ACCELERATOR": "cuda" if visible_gpus else "cpu"}
    for steps in (8, 10):
        overrides = [f"data.manifest={manifest}", f"run.dir={folder}", f"train.steps={steps}", *settings]
        done = run(command(*overrides), **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"on {'cuda' if visible_gpus else 'cpu'}" in done.stdout
    return runs.curve(folder, "train/loss")


RETRACTIONS = {
    "exponential, output saved": Retraction(max_angle=1.5, save="output"),
    "exponential, free": Retraction(),
    "projection": Retraction(power=1.0),
    "p = 3": Retraction(power=3.0),
}


def retraction_error(retraction: Retraction, device: str, dtype: torch.dtype) -> float:
    """Largest relative error of the step's output and gradients against fp64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    state, update, grad = (torch.randn(64, 256, generator=generator).to(dtype) for _ in range(3))

    def outcome(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        x, u = (tensor.detach().clone().to(device, dtype).requires_grad_() for tensor in (state, update))
        y = retract(x, u, 0.5, retraction)
        y.backward(grad.to(device, dtype))
        return [tensor.detach().cpu().double() for tensor in (y, x.grad, u.grad) if tensor is not None]

    pairs = zip(outcome(device, dtype), outcome("cpu", torch.float64), strict=True)
    return max(float((got - expected).norm() / expected.norm()) for got, expected in pairs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", RETRACTIONS)
def test_retraction_as_the_gpu_test_calls_it(name: str, dtype: torch.dtype, limit: float) -> None:
    assert retraction_error(RETRACTIONS[name], "cpu", dtype) < limit


@pytest.mark.dist
@pytest.mark.parametrize("settings", [[], ["scheme=p", "p=3"]], ids=["default", "p"])
def test_training_as_the_gpu_test_calls_it(manifest: Path, tmp_path: Path, settings: list[str]) -> None:
    overrides = [f"model.residual.{setting}" for setting in settings]
    assert len(losses(manifest, tmp_path / "run", "", *overrides)) == 10


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", RETRACTIONS)
def test_retraction_on_the_gpu(name: str, dtype: torch.dtype, limit: float) -> None:
    assert retraction_error(RETRACTIONS[name], "cuda", dtype) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_a_gpu_trains_and_resumes_as_the_cpu(manifest: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    setting = f"train.precision={precision}"
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_gpu = losses(manifest, tmp_path / "gpu", gpu, setting)
    assert on_gpu == pytest.approx(losses(manifest, tmp_path / "cpu", "", setting), rel=tolerance)


def attention_error(device: str, dtype: torch.dtype) -> float:
    """Largest relative error of attention within documents, output and gradients, against fp64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (2, 300), generator=generator)
    documents = find_documents(tokens, eod_id=0)
    inputs = [torch.randn(300, 2, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2)]
    grad = torch.randn(300, 2, 4, 64, generator=generator).to(dtype)

    def outcome(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (tensor.detach().clone().to(device, dtype).requires_grad_() for tensor in inputs)
        there = documents.to(torch.device(device))
        if flash_can_attend(q.device, q.dtype, q.shape[-1], 0.0):
            mixed = attend_by_flash(q, k, v, there, None)
        else:
            attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            mixed = attend_by_length(q, k, v, there, attend)
        mixed.backward(grad.to(device, dtype))
        return [tensor.detach().cpu().double() for tensor in (mixed, q.grad, k.grad, v.grad) if tensor is not None]

    pairs = zip(outcome(device, dtype), outcome("cpu", torch.float64), strict=True)
    return max(float((got - expected).norm() / expected.norm()) for got, expected in pairs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_within_documents_as_the_gpu_test_calls_it(dtype: torch.dtype, limit: float) -> None:
    assert attention_error("cpu", dtype) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_within_documents_on_the_gpu(dtype: torch.dtype, limit: float) -> None:
    """In bf16 by torch's variable-length attention."""
    assert attention_error("cuda", dtype) < limit


def context_error(device: str, dtype: torch.dtype, cp_size: int = 2) -> float:
    """Largest relative error of what context-parallel ranks compute of documents, against whole samples in fp64."""
    generator = torch.Generator().manual_seed(0)
    documents = find_documents(torch.randint(0, 20, (2, 320), generator=generator), eod_id=0)
    query, key, value = (torch.randn(320, 2, heads, 64, generator=generator).to(dtype) for heads in (4, 2, 2))
    gqa = partial(F.scaled_dot_product_attention, enable_gqa=True)
    doubles = [tensor.double() for tensor in (query, key, value)]
    whole = attend_by_length(*doubles, documents, partial(gqa, is_causal=True)).transpose(0, 1)
    errors = []
    for cp_rank in range(cp_size):
        runs_here = find_runs(documents, cp_rank, cp_size).to(torch.device(device))
        own = own_part(query.transpose(0, 1), cp_rank, cp_size).flatten(0, 1).to(device)
        keys, values = (tensor.transpose(0, 1).flatten(0, 1).to(device) for tensor in (key, value))
        if flash_can_attend(own.device, dtype, 64, 0.0):
            mixed = attend_runs_by_flash(own, keys, values, runs_here, None)
        else:
            mixed = attend_by_run(own, keys, values, runs_here, gqa)
        expected = own_part(whole, cp_rank, cp_size).flatten(0, 1)
        errors.append(float((mixed.cpu().double() - expected).norm() / expected.norm()))
    return max(errors)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_context_parallel_documents_as_the_gpu_test_calls_it(dtype: torch.dtype, limit: float) -> None:
    assert context_error("cpu", dtype) < limit
    assert context_error("cpu", dtype, cp_size=4) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_context_parallel_documents_on_the_gpu(dtype: torch.dtype, limit: float) -> None:
    assert context_error("cuda", dtype) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["zero.stage=0", "zero.stage=2", "zero.stage=3", "zero.offload_optimizer=true"])
def test_every_zero_stage_trains_on_a_gpu_as_on_the_cpu(manifest: Path, tmp_path: Path, setting: str) -> None:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_gpu = losses(manifest, tmp_path / "gpu", gpu, setting)
    assert on_gpu == pytest.approx(losses(manifest, tmp_path / "cpu", "", setting), rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_a_gpu_keeps_documents_apart_as_the_cpu(
    manifest: Path, tmp_path: Path, precision: str, tolerance: float
) -> None:
    settings = [f"train.precision={precision}", "data.separate_documents=true"]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_gpu = losses(manifest, tmp_path / "gpu", gpu, *settings)
    assert on_gpu == pytest.approx(losses(manifest, tmp_path / "cpu", "", *settings), rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SCHEME_SETTINGS, ids=lambda settings: settings[0])
def test_every_scheme_trains_on_a_gpu_as_on_the_cpu(manifest: Path, tmp_path: Path, settings: list[str]) -> None:
    overrides = ["train.precision=fp32", *(f"model.residual.{setting}" for setting in settings)]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    on_gpu = losses(manifest, tmp_path / "gpu", gpu, *overrides)
    assert on_gpu == pytest.approx(losses(manifest, tmp_path / "cpu", "", *overrides), rel=1e-4)
