"""The benchmarks of the kernels: `residual`, and a dry run of `gpu`. Nothing is compiled in them here."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.test_bench import bench
from tools.bench import gpu_checks, pairs
from tools.bench.gpu_checks import Checks
from tools.bench.gpu_kernels import LIMITS, Bandwidth
from tools.bench.gpu_steps import Case, Measured

WITHOUT_THE_REST = """
import sys
names = "boto3 braceexpand lm_eval matplotlib pyarrow sentencepiece tensorboard transformers webdataset"
sys.modules |= dict.fromkeys(names.split())
"""


def ran(path: Path, *arguments: str, **variables: str) -> tuple[dict[str, Any], str]:
    variables |= {"TORCHDYNAMO_DISABLE": "1"}
    ended = bench(*arguments, "--threads", "1", "--json", str(path), variables=variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(path.read_text())["results"], ended.stdout


def test_bounds_are_ranks_of_the_binomial_distribution() -> None:
    """For 20 values the 6th and the 15th: fewer than 6 of 20 coins fall one way with 2.1 %, fewer than 7 with 5.8 %."""
    assert pairs.bounds([float(value) for value in range(20, 0, -1)]) == (6.0, 15.0)
    assert pairs.bounds([float(value) for value in range(1, 101)]) == (40.0, 61.0)
    assert pairs.bounds([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert pairs.bounds([5.0]) == (5.0, 5.0)


@pytest.mark.dist
def test_residual_from_the_command_line(tmp_path: Path) -> None:
    results, output = ran(
        tmp_path / "x.json", "residual", "--rounds", "3", "--shape", "16", "64", "--preset", "tiny", "--layers", "2"
    )
    assert [(row["dtype"], row["threads"]) for row in results["time"]] == [("float32", 1), ("bfloat16", 1)]
    for row in results["time"]:
        assert row["shape"] == [16, 64]
        assert list(row["rows"])[1:] == [f"{name}, {k}" for name in ("proj", "geonorm") for k in ("compiled", "eager")]
        assert all(len(turns) == 3 for turns in row["rows"].values())
    (steps,) = results["step"]
    assert list(steps["rows"]) == ["pre_norm", "geonorm"]
    ratios = sorted(mine["wall"] / peer["wall"] for mine, peer in zip(*reversed(steps["rows"].values()), strict=True))
    assert f"{ratios[1]:.3f}  {ratios[0]:.3f}-{ratios[2]:.3f}" in output
    kept = {recompute: dict(by_name) for recompute, by_name in results["bytes"].items()}
    assert list(kept) == ["none", "selective"]
    for row in kept.values():
        assert row["geonorm"] < row["pre_norm"] < row["pre_norm by torch's own rms_norm"]
    # Of two layers the stream's entry is more than of eight, where this is 0.888.
    assert kept["none"]["geonorm"] / kept["none"]["pre_norm"] == pytest.approx(0.910, abs=0.001)


@pytest.mark.dist
def test_a_dry_run_of_the_gpu_s_checks(tmp_path: Path) -> None:
    """With no more packages than the results page asks for."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THE_REST)
    results, output = ran(tmp_path / "x.json", "gpu", "--tiny", PYTHONPATH=str(tmp_path))
    assert results["troubles"] == {}
    assert {name.rsplit(" ", 1)[1] for name in results["parity"]} == {"float32", "bfloat16"}
    assert any(name.startswith("geonorm, eager") for name in results["bandwidth"])
    assert list(results["steps"]) == [
        f"{scheme}, {compiled}, recompute {recompute}"
        for recompute, scheme, compiled in itertools.product(
            ("none", "selective"), ("geonorm", "pre_norm"), ("not compiled", "compiled")
        )
    ]
    # Recomputing changes no loss.
    losses = [step["loss"] for step in results["steps"].values()]
    assert losses[:4] == losses[4:]
    assert results["retractions_of_step"] > 0
    *_, of_error, of_bandwidth, of_share, of_mfu, _, _ = output.splitlines()
    assert of_error.endswith("met")
    assert of_bandwidth.endswith("NOT RUN") or "triton" in "".join(results["bandwidth"])
    assert of_share.endswith(("met", "MISSED"))
    assert of_mfu.endswith("NOT RUN")


def test_without_a_gpu_it_says_so() -> None:
    ended = bench("gpu", variables={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 2
    assert ended.stderr == "error: gpu needs a GPU, and CUDA finds none; --tiny tries the same code on the CPU\n"


def test_a_check_that_fails_takes_nothing_else_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(60)
    assert checks.attempt("bad", lambda: 1 / 0) is None
    assert checks.attempt("good", math.sqrt, 4) == 2
    late = Checks(-1)
    assert late.attempt("late", math.sqrt, 4) is None
    assert checks.troubles | late.troubles == {"bad": "FAILED: division by zero", "late": "NOT RUN: no time left"}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks.gpu_kernels, "runnable", lambda device: ["eager"])
    monkeypatch.setattr(gpu_checks.gpu_kernels, "parity", lambda *arguments: math.nan)
    checks = Checks(60)
    gpu_checks.check_parity(checks, torch.device("cpu"), (8, 64))
    assert [trouble.split(":")[0] for trouble in checks.troubles.values()] == ["FAILED"] * len(LIMITS)


def test_an_error_that_is_no_number_is_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of NaN beside an output that is right."""
    ones = torch.ones(3)
    monkeypatch.setattr(
        gpu_checks.gpu_kernels,
        "_outcome",
        lambda kernels, *_: [ones, ones if kernels == "eager" else ones * math.nan, ones],
    )
    error = gpu_checks.gpu_kernels.parity("triton", torch.float32, torch.device("cpu"), (8, 64))
    assert math.isnan(error)
    rows = gpu_checks.summary(
        {"error of eager in float32": 1e-7, "error of triton in float32": error}, {}, {}, None, 7.0
    )
    assert rows.splitlines()[1].split()[-2:] == ["nan", "MISSED"]


def test_residual_times_nothing_as_compiled_that_is_not(tmp_path: Path) -> None:
    """As where no compiler is: the path names none, and neither does what torch asks first."""
    ended = bench("residual", "--only", "step", variables={"PATH": str(tmp_path), "CXX": ""})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: residual compares compiled kernels, and torch.compile does not work here (")
    assert ended.stderr.count("\n") == 1


def test_the_summary_names_what_was_missed() -> None:
    speeds = {"geonorm, triton, 8 x 4": {"forward": Bandwidth(1e-3, 0.9), "backward": Bandwidth(2e-3, 0.8)}}
    steps = {
        Case("geonorm", "none", compiled): Measured(seconds=1.0, tokens_per_second=1.0, mfu=mfu, peak_gib=1.0, loss=1.0)
        for compiled, mfu in ((False, 0.45), (True, 0.55))
    }
    share = gpu_checks.retraction_share(speeds, (8, 4), steps, layers=3)
    assert share == pytest.approx(2 * 3 * 2 * 3e-3)
    errors = {"error of triton in float32": 1e-7, "error of triton in bfloat16": 0.1}
    rows = gpu_checks.summary(errors, speeds, steps, share, 7.0).splitlines()
    assert [row.split()[-1] for row in rows[1:6]] == ["met", "MISSED", "MISSED", "MISSED", "met"]
    assert rows[-1] == "7 s in all, without imports"
