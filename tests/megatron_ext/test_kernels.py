"""The implementations agree; each is chosen where it can run, and refused or replaced with a word where it cannot."""

import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext import kernels
from megatron_ext.kernels import EAGER, kernels_of, resolve
from megatron_ext.kernels.compiled import Part
from megatron_ext.mlp import swiglu
from megatron_ext.norms import RMSNorm
from tests.launch import REPOSITORY
from tests.megatron_ext import kernel_cases, small


def test_the_eager_kernels_in_fp32_and_bf16() -> None:
    assert kernel_cases.check("eager", kernel_cases.WAYS) > 100


def test_the_compiled_kernels() -> None:
    """Three members of the family in one process show each part, with and without what may come before."""
    assert kernel_cases.check("compiled", kernel_cases.WAYS[8:9], [torch.float32]) == 5
    assert kernel_cases.check("compiled", kernel_cases.WAYS[6:7], [torch.float32]) == 5
    assert kernel_cases.check("compiled", kernel_cases.WAYS[1:2], [torch.bfloat16]) == 8
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    other = [
        kernel_cases.outcome("compiled", torch.bfloat16, kernel_cases.WAYS[1], (3, 7, 72)),
        kernel_cases.outcome("compiled", torch.float32, kernel_cases.WAYS[8], (9, 1, 72), step_size=0.4),
    ]
    same = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert same == before, "another number of rows, or another step size, was compiled"
    for name, value in (pair for outcome in other for pair in outcome.items()):
        assert value.isfinite().all(), name


def graphs_of(part: Part, rows: Iterable[int], *others: Any, width: int = 8) -> list[int]:
    """Graphs that were made by a call with each number of rows."""
    made = []
    for number in rows:
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        part(torch.ones(number, width), *others)
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    return made


def test_what_code_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every width and all that is around a call, at its first time; for no number of rows but none and one."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **_: compile_(part, fullgraph=True, backend="eager"))

    def scaled(x: torch.Tensor, factor: float, *gains: torch.Tensor) -> torch.Tensor:
        return sum(gains, x * math.exp(factor))  # which would be an error if the factor were a variable

    part = Part(scaled)
    rows, new = (3, 5, 1, 1, 0, 0, 7), [1, 0, 1, 0, 1, 0, 0]
    for width in (8, 16, 24):
        assert graphs_of(part, rows, 0.5, width=width) == new
    for factor in (0.1, 0.2, 0.3):
        assert graphs_of(part, (3, 5), factor) == [1, 0]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        for factor in (0.1, 0.2, 0.3):
            assert graphs_of(part, (3, 5), factor) == [1, 0]
    finally:
        torch.set_num_threads(threads)
    for gain in (torch.ones(8), torch.ones(8, dtype=torch.bfloat16)):
        assert graphs_of(part, (3, 5), 0.1, gain) == [1, 0]
    with torch.inference_mode():
        assert graphs_of(part, (3, 5), 0.1) == [1, 0]
    with torch.no_grad():
        assert graphs_of(part, (3, 5), 0.1) == [1, 0]
    assert graphs_of(part, (9,), 0.1) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", ["eager", "compiled"])
def test_the_norm_is_torchs_and_keeps_its_input_and_a_number_a_row(choice: str, dtype: torch.dtype) -> None:
    config = small.config(small.settings(kernels=choice), dtype)
    norm = RMSNorm(config, 48, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 48))
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(7, 2, 48, generator=generator).to(dtype) for _ in range(2))
    kept: list[torch.Tensor] = []
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        y = norm(x)
    gradients = torch.autograd.grad(y, [x, norm.weight], g)
    wide, gain = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = F.rms_norm(wide, (48,), gain, 1e-5)
    for a, e in zip((y, *gradients), (expected, *torch.autograd.grad(expected, [wide, gain], g.double())), strict=True):
        assert a.dtype == dtype
        assert (a.double() - e).norm() < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype] * e.norm()
    assert sorted(tensor.numel() for tensor in kept) == [14, 48, x.numel()]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_plain_formula_bit_for_bit_and_keeps_its_input_alone(dtype: torch.dtype, bias: bool) -> None:
    z, g = torch.randn(5, 2, 96).to(dtype), torch.randn(5, 2, 48).to(dtype)
    inputs = [tensor.requires_grad_() for tensor in (z, torch.randn(96).to(dtype))[: 1 + bias]]
    hidden = sum(inputs[1:], inputs[0])
    gate, value = hidden.chunk(2, dim=-1)
    plain = F.silu(gate) * value
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        ours = swiglu(*inputs)
    assert [tensor.shape for tensor in kept] == [z.shape]
    assert torch.equal(ours, plain)
    for a, e in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(plain, inputs, g), strict=True):
        assert torch.equal(a, e)


def test_no_rows_at_all() -> None:
    z = torch.ones(0, 2, 8, requires_grad=True)
    y = swiglu(z)
    y.sum().backward()
    assert y.shape == (0, 2, 4)
    assert z.grad is not None
    assert z.grad.shape == z.shape


def test_what_each_choice_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert resolve("auto", "cpu") == ("eager", None)
    assert resolve("eager", "cuda") == ("eager", None)
    with pytest.raises(ValueError, match=r"kernels=triton: .*; set auto, compiled or eager"):
        resolve("triton", "cpu")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert resolve("auto", "cuda") == ("eager", None)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        resolve("triton", "cuda")
    monkeypatch.setattr(kernels, "find_spec", lambda name: "found")
    assert resolve("auto", "cuda") == ("triton", None)
    assert resolve("triton", "cuda") == ("triton", None)


def test_fp64_and_the_meta_device_are_eager() -> None:
    assert kernels_of("compiled", torch.zeros(2, dtype=torch.float64)) is EAGER
    assert kernels_of("triton", torch.zeros(2, device="meta")) is EAGER


NO_COMPILER = """
import warnings, torch
from megatron_ext.retraction import Retraction, retract
from megatron_ext.kernels import resolve
x, u = torch.ones(4, 8), torch.eye(4, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    y = [retract(x, u, 0.5, Retraction(), kernels="compiled") for _ in range(3)]
said = [str(warning.message) for warning in caught if "kernels" in str(warning.message)]
print(len(said), said[0])
print(torch.equal(y[2], retract(x, u, 0.5, Retraction(), kernels="eager")), resolve("compiled", "cpu")[0])
"""


def python(*arguments: str, **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_without_a_compiler_one_warning_and_eager(tmp_path: Path) -> None:
    """The path names no compiler; neither does what torch asks first."""
    output = python("-c", NO_COMPILER, PATH=str(tmp_path), CXX="", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    first, second = output.splitlines()
    assert first.startswith("1 kernels=compiled: torch.compile does not work here (")
    assert first.endswith("; eager is used instead")
    assert second == "True eager"
    assert list((tmp_path / "cache").glob("tmp*")) == [], "the attempt left its files"


def test_a_cache_that_cannot_be_written_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/sys/kernel")  # not even by root
    assert "/proc/sys/kernel/" in str(kernels.compiled.why_not_compile(torch.device("cpu")))


@pytest.mark.triton
def test_the_triton_kernels_in_the_interpreter() -> None:
    output = python("-m", "tests.megatron_ext.kernel_cases", TRITON_INTERPRET="1")
    assert int(output.split()[0]) > 100


@pytest.mark.gpu
def test_the_triton_kernels_on_a_gpu() -> None:
    """As in the interpreter; there bf16 is rounded."""
    kernel_cases.check("triton", kernel_cases.WAYS)


@pytest.mark.gpu
def test_the_compiled_kernels_on_a_gpu() -> None:
    kernel_cases.check("compiled", [kernel_cases.WAYS[number] for number in (1, 6, 8, 10)])


def test_a_model_computes_the_same_by_compiled_kernels(single_process: None) -> None:
    """Loss and every gradient, of a model that learns its step sizes and of one with norms."""
    for scheme in ("proj", "pre_norm"):
        results = []
        for choice in ("eager", "compiled"):
            stage = small.build(small.settings(scheme, kernels=choice))
            tokens, labels, positions, weights = small.batch()
            loss = (stage(tokens, positions, None, labels=labels) * weights).sum()
            loss.backward()
            results.append([loss.detach(), *(parameter.grad for parameter in stage.parameters())])
        for a, e in zip(*results, strict=True):
            assert (a - e).norm() < 1e-4 * e.norm()
