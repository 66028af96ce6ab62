"""The checks of the benchmark `gpu` in their order, within their time, and their tables."""

import argparse
import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from pretrain import parallel
from pretrain.errors import UserError
from pretrain.parallel import Place
from tools.bench import gpu_kernels
from tools.bench.alone import launched_alone
from tools.bench.gpu_kernels import LIMITS, Bandwidth
from tools.bench.gpu_steps import MODELS, Case, Measured, Model, configuration
from tools.bench.report import Report, table
from tools.bench.residual_timing import RETRACTIONS
from tools.bench.step import MICRO_BATCHES

SHAPES = ((4096, 2048), (8192, 4096))
"""(rows, hidden) whose bandwidth is wanted, beside the model's own."""

STEPS = 5
WANTED_BANDWIDTH, WANTED_SHARE, WANTED_MFU = 0.85, 0.01, 0.50


class Checks:
    """Runs one check after another until the time is up; keeps what each came to, or why it did not."""

    def __init__(self, budget: float) -> None:
        self._end = time.monotonic() + budget
        self.results: dict[str, Any] = {}
        self.troubles: dict[str, str] = {}

    def attempt(self, name: str, check: Callable[..., Any], *arguments: Any) -> Any:
        """The check's result, which is printed at once; None where it failed or could not begin."""
        if time.monotonic() > self._end:
            self.troubles[name] = "NOT RUN: no time left"
            return None
        start = time.monotonic()
        try:
            self.results[name] = check(*arguments)
        except Exception as error:
            # The machine is there for minutes: the other checks still count.
            traceback.print_exc()
            self.troubles[name] = f"FAILED: {str(error).strip().splitlines()[0] if str(error) else repr(error)}"
        said = self.troubles.get(name, self.results.get(name))
        print(f"{name}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
        return self.results.get(name)


def run(arguments: argparse.Namespace) -> Report:
    """Kernels first, then whole steps.

    Raises:
        UserError: no GPU, and not --tiny; several processes.
    """
    launch = launched_alone("gpu")
    tiny = bool(arguments.tiny)
    if not tiny and not torch.cuda.is_available():
        raise UserError("gpu needs a GPU, and CUDA finds none; --tiny tries the same code on the CPU")
    started = time.monotonic()
    config = configuration("none", tiny=tiny)
    place = parallel.start(launch, config.parallel, config.train.seed)
    checks = Checks(arguments.budget)
    own_shape = (config.train.micro_batch * config.model.sequence_length, config.model.hidden_size)
    errors = check_parity(checks, place.device, (8, 64) if tiny else (512, 2048))
    shapes = [own_shape] if tiny else [*SHAPES, own_shape]
    speeds = check_bandwidth(checks, place.device, shapes)
    steps = check_steps(checks, place, tiny=tiny)
    parallel.stop()
    share = retraction_share(speeds, own_shape, steps, config.model.num_layers)
    text = "\n\n".join(
        [
            bandwidth_table(speeds),
            steps_table(steps),
            *([f"{name}: {trouble}" for name, trouble in checks.troubles.items()]),
            summary(errors, speeds, steps, share, time.monotonic() - started),
        ]
    )
    settings = {"tiny": tiny, "budget": arguments.budget, "model": dataclasses.asdict(config.model)}
    results = {
        "parity": errors,
        "bandwidth": {name: {k: dataclasses.asdict(b) for k, b in speed.items()} for name, speed in speeds.items()},
        "steps": {str(case): dataclasses.asdict(measured) for case, measured in steps.items()},
        "retractions_of_step": share,
        "troubles": checks.troubles,
    }
    return Report(text, results, settings, failed=any("FAILED" in trouble for trouble in checks.troubles.values()))


def check_parity(checks: Checks, device: torch.device, shape: tuple[int, int]) -> dict[str, float]:
    """Largest relative error by implementation and type."""
    errors = {}
    for kernels in gpu_kernels.runnable(device):
        for dtype in LIMITS:
            name = f"error of {kernels} in {str(dtype)[6:]}"
            error = checks.attempt(name, gpu_kernels.parity, kernels, dtype, device, shape)
            if error is not None:
                errors[name] = error
                if not error < LIMITS[dtype]:
                    checks.troubles[name] = f"FAILED: {error:.1e} is not below {LIMITS[dtype]}"
    return errors


def check_bandwidth(
    checks: Checks, device: torch.device, shapes: list[tuple[int, int]]
) -> dict[str, dict[str, Bandwidth]]:
    """By retraction, implementation and shape."""
    found = {}
    for shape in shapes:
        for kernels in reversed(gpu_kernels.runnable(device)):
            for name, retraction in RETRACTIONS.items():
                title = speed_name(name, kernels, shape)
                speed = checks.attempt(title, gpu_kernels.bandwidths, kernels, retraction, device, shape)
                if speed is not None:
                    found[title] = speed
    return found


def speed_name(retraction: str, kernels: str, shape: tuple[int, int]) -> str:
    """Of a line in the table of bandwidths."""
    return f"{retraction}, {kernels}, {shape[0]} x {shape[1]}"


def check_steps(checks: Checks, place: Place, *, tiny: bool) -> dict[Case, Measured]:
    """Each model is built once, and its layers compiled after it was measured without."""
    found: dict[Case, Measured] = {}

    def both(scheme: str, recompute: str) -> str:
        with Model(scheme, configuration(recompute, tiny=tiny), place) as model:
            for compiled in (False, True):
                if compiled:
                    model.compile()
                case = Case(scheme, recompute, compiled)
                measured = checks.attempt(str(case), model.measure, 2 if tiny else STEPS)
                if measured is not None:
                    found[case] = measured
        return "measured"

    for scheme, recompute in MODELS:
        checks.attempt(f"{scheme}, recompute {recompute}", both, scheme, recompute)
    return found


def retraction_share(
    speeds: dict[str, dict[str, Bandwidth]], shape: tuple[int, int], steps: dict[Case, Measured], layers: int
) -> float | None:
    """Share of geonorm's step, not compiled, that its retractions take; None if either was not measured."""
    kernels = next((name for name in ("triton", "eager") if speed_name("geonorm", name, shape) in speeds), None)
    step = steps.get(Case("geonorm", "none", compiled=False))
    if kernels is None or step is None:
        return None
    once = sum(speed.seconds for speed in speeds[speed_name("geonorm", kernels, shape)].values())
    return 2 * layers * MICRO_BATCHES * once / step.seconds


def bandwidth_table(speeds: dict[str, dict[str, Bandwidth]]) -> str:
    """Microseconds and share of a copy's bandwidth."""
    rows = [
        [name, *(cell for speed in passes.values() for cell in (f"{speed.seconds * 1e6:.1f}", f"{speed.of_copy:.2f}"))]
        for name, passes in speeds.items()
    ]
    return table(["bf16", "forward us", "of a copy's GB/s", "backward us", "of a copy's GB/s"], rows)


def steps_table(steps: dict[Case, Measured]) -> str:
    """A line for each case."""
    rows = [
        [
            str(case),
            f"{measured.seconds * 1e3:.1f}",
            f"{measured.tokens_per_second:,.0f}",
            "-" if measured.mfu is None else f"{measured.mfu:.3f}",
            f"{measured.peak_gib:.1f}",
            f"{measured.loss:.3f}",
        ]
        for case, measured in steps.items()
    ]
    return table(["whole step", "ms", "tokens/s", "MFU", "peak GiB", "loss"], rows)


def summary(
    errors: dict[str, float],
    speeds: dict[str, dict[str, Bandwidth]],
    steps: dict[Case, Measured],
    share: float | None,
    seconds: float,
) -> str:
    """What is wanted, what was measured."""
    triton = [speed.of_copy for name, passes in speeds.items() if ", triton," in name for speed in passes.values()]
    of_geonorm = [measured.mfu for case, measured in steps.items() if case.scheme == "geonorm"]
    best = max((mfu for mfu in of_geonorm if mfu is not None), default=None)
    rows = [
        *(
            line(f"{name}, at most", gpu_kernels.largest(found) if found else None, limit, least=False, form=".1e")
            for dtype, limit in LIMITS.items()
            for name in [f"largest error in {str(dtype)[6:]}"]
            for found in [[error for of, error in errors.items() if of.endswith(str(dtype)[6:])]]
        ),
        line("triton's share of a copy's bandwidth, at least", min(triton, default=None), WANTED_BANDWIDTH, least=True),
        line("geonorm's retractions of a step, at most", share, WANTED_SHARE, least=False, form=".3f"),
        line("geonorm's best MFU, at least", best, WANTED_MFU, least=True),
    ]
    return f"{table(['', 'wanted', 'measured', ''], rows)}\n\n{seconds:.0f} s in all, without imports"


def line(name: str, measured: float | None, wanted: float, *, least: bool, form: str = ".2f") -> list[str]:
    """One of the summary."""
    if measured is None:
        return [name, f"{wanted:{form}}", "", "NOT RUN"]
    met = measured >= wanted if least else measured <= wanted
    return [name, f"{wanted:{form}}", f"{measured:{form}}", "met" if met else "MISSED"]
