"""The spike detector on noise: how often it acts without a cause, and which planted spikes it finds."""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.config import SpikeSettings
from pretrain.errors import UserError
from pretrain.monitor.spikes import RECENT, SIGNALS, Detector, calls_for_action, score
from tools.arguments import positive_int
from tools.bench.report import Report, table

STEPS = 10_000
FIRST = 500
"""Actions before it are not counted: the mean of a run's beginning falls."""
LOSS_SPREAD, NORM_SPREAD = 0.03, 0.04
LONE, RAMP, RAMP_STEPS = 15.0, 20.0, 50
CORRELATIONS = (0.0, 0.5, 0.9)

Runs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Found:
    """What came out for one kind of noise.

    Attributes:
        false_actions: a run, on average.
        found: what was planted, in which signal -> share of the runs in which it was acted on.
    """

    false_actions: float
    found: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the study."""
    parser.add_argument("--seeds", type=positive_int, default=50, metavar="N", help="runs of each kind (default 50)")
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="judge the curves of these run folders instead: what a run without spikes gives are false alarms",
    )


def run(arguments: argparse.Namespace) -> Report:
    """Every kind of noise, or runs that were made."""
    if arguments.runs:
        return _judge_runs(arguments.runs)
    studies = {correlation: study(correlation, arguments.seeds) for correlation in CORRELATIONS}
    planted = list(next(iter(studies.values())).found)
    head = ["correlation", "false actions a run", *planted]
    rows = [
        [f"{correlation:g}", f"{one.false_actions:.2f}", *(f"{one.found[name]:.2f}" for name in planted)]
        for correlation, one in studies.items()
    ]
    results = {f"{correlation:g}": asdict(one) for correlation, one in studies.items()}
    about = (
        f"{arguments.seeds} runs of {STEPS} steps, Student-t(4) noise on both signals; a lone spike of {LONE:g} "
        f"standard deviations, a ramp to {RAMP:g} in {RAMP_STEPS} steps: share acted on, by the signals with the spike"
    )
    return Report(f"{about}\n\n{table(head, rows)}", results, {"seeds": arguments.seeds, "steps": STEPS})


def study(correlation: float, seeds: int, seed: int = 1, steps: int = STEPS) -> Found:
    """Noise alone, then with spikes planted in the loss, the gradient norm, or both."""
    settings = SpikeSettings()
    losses, norms = noisy_run(correlation, seeds, steps, seed)
    false = actions(losses, norms, settings)[:, FIRST:].sum() / seeds
    places = np.random.default_rng(7).integers(2000, steps - 2 * RAMP_STEPS, seeds)
    shapes = {"lone": np.array([LONE]), "ramp": np.linspace(0, RAMP, RAMP_STEPS)}
    found = {}
    for shape, heights in shapes.items():
        for name in ("loss", "grad_norm", "both"):
            window = slice(-settings.window - 2 * RECENT, len(heights))
            cut = np.arange(window.start, window.stop) + places[:, None]
            rows = np.arange(seeds)[:, None]
            signals = [losses[rows, cut], norms[rows, cut]]
            for signal, own, spread in zip(signals, ("loss", "grad_norm"), (LOSS_SPREAD, NORM_SPREAD), strict=True):
                if name in (own, "both"):
                    signal[:, -len(heights) :] += spread * heights
            acted = actions(signals[0], signals[1], settings)[:, -len(heights) :]
            found[f"{shape}, {name}"] = float(acted.any(axis=1).mean())
    return Found(float(false), found)


def _judge_runs(runs: list[Path]) -> Report:
    """Told and acted-on steps of curves, as the settings' defaults would have had it; warmups are not judged."""
    rows, results = [], {}
    for run_folder in runs:
        if not (run_folder / "tensorboard").is_dir():
            raise UserError(f"{run_folder} has no tensorboard/; name the folder of a run")
        curves = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        if "train/loss" not in curves.Tags()["scalars"]:
            raise UserError(f"{run_folder} has no curves of losses; name the folder of a run")
        losses, norms, rates = (
            [point.value for point in curves.Scalars(f"train/{name}")] for name in ("loss", "grad_norm", "lr")
        )
        first = curves.Scalars("train/loss")[0].step
        detector = Detector(SpikeSettings(), judge_from=first + int(np.argmax(rates)) + 1)
        verdicts = {
            step: detector.judge(step, {"loss": loss, "grad_norm": norm})
            for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first)
        }
        told = [step for step, verdict in verdicts.items() if verdict.told]
        acted = [step for step, verdict in verdicts.items() if verdict.act]
        largest = {name: max(verdict.scores[name] for verdict in verdicts.values()) for name in SIGNALS}
        results[str(run_folder)] = {"steps": len(losses), "told": told, "acted": acted, "largest": largest}
        scores = [f"{value:.1f}" for value in largest.values()]
        rows.append([str(run_folder), str(len(losses)), str(len(told)), str(len(acted)), *scores])
    head = ["run", "steps", "told", "acted on", *(f"largest {name}" for name in SIGNALS)]
    return Report(table(head, rows), results, {"settings": SpikeSettings().model_dump()})


def noisy_run(correlation: float, runs: int, steps: int, seed: int) -> tuple[Runs, Runs]:
    """Losses and gradient norms ``[runs, steps]`` that fall and carry AR(1) noise of unit variance times a spread."""
    time = np.arange(steps)
    fall = (1 + time / 200) ** -0.5
    noise = [_noise(correlation, runs, steps, seed + offset) for offset in (0, 1000)]
    return 2 + 8 * fall + LOSS_SPREAD * noise[0], 0.4 + 0.6 * fall + NORM_SPREAD * noise[1]


def actions(losses: Runs, norms: Runs, settings: SpikeSettings) -> npt.NDArray[np.bool_]:
    """At which steps of each run the detector acts, ``[runs, steps]``: all of them at once."""
    scores = [_scores(signal, settings.window) for signal in (losses, norms)]
    padded = [np.pad(signal, ((0, 0), (RECENT - 1, 0))) for signal in scores]
    recent = [sliding_window_view(signal, RECENT, axis=1) for signal in padded]
    return calls_for_action(recent[0], recent[1], settings)


def _noise(correlation: float, runs: int, steps: int, seed: int) -> Runs:
    """Student's t with 4 degrees of freedom has variance 2."""
    innovations = np.random.default_rng(seed).standard_t(4, (steps, runs)) / np.sqrt(2)
    noise = np.empty((steps, runs))
    noise[0] = innovations[0]
    scale = np.sqrt(1 - correlation**2)
    for step in range(1, steps):
        noise[step] = correlation * noise[step - 1] + scale * innovations[step]
    return noise.T


def _scores(signal: Runs, window: int) -> Runs:
    found = np.zeros_like(signal)
    for run_scores, run_values in zip(found, signal, strict=True):  # one at a time: the windows are copied
        run_scores[window:] = score(sliding_window_view(run_values, window)[:-1], run_values[window:])
    return found
