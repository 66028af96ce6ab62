"""The measurement and the table of the benchmark `logging`."""

import argparse
import contextlib
import dataclasses
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pretrain import parallel
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.monitor.layer_norms import LayerNorms
from pretrain.monitor.metrics import Metrics, StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.state import TrainState
from tools.bench import pairs
from tools.bench.alone import launched_alone
from tools.bench.contenders import GEONORM, WARM_UP_STEPS, random_batches, synchronizer, uniform_counts, with_scheme
from tools.bench.report import Report, table
from tools.bench.step import PRESETS
from tools.bench.step_timing import bench_config, tokens_per_step

BARE, GEOMETRY, NORMS, LOG_STEP = "not watched", "+ geometry", "+ norms per layer", "log step, all of it"
_FAR = 10**9  # so many steps that no other occasion makes a log step
_BOOKKEEPING_STEPS = 2000


class Watched:
    """A model in training, and the ways to take a step of it."""

    def __init__(self, config: Config, place: Place, folder: Path) -> None:
        self._config = config
        model = with_scheme(config.model, GEONORM)
        self._engine = Engine(config, model, uniform_counts(config), place)
        self._metrics = Metrics(config, model, self._engine, Board(folder, 0, 0))
        self._norms = LayerNorms(self._engine, model.num_layers)
        self._batches: Sequence[MicroBatch] = random_batches(config, place.device)
        self._state = TrainState()
        self._metrics.start(self._state)

    def turns(self) -> dict[str, Callable[[], object]]:
        """Row -> a step."""
        every = self._config.logging.every
        return {
            BARE: self._bare,
            GEOMETRY: lambda: self._parts(geometry=True),
            NORMS: lambda: self._parts(geometry=False),
            LOG_STEP: lambda: self._watched(self._state.step // every * every + every),
        }

    def seconds_between(self) -> float:
        """Of what a step between two log steps does beside training, measured alone."""
        result = StepResult(0.0, 0.0, 0.0)
        self._state.step = 1
        started = time.perf_counter()
        for _ in range(_BOOKKEEPING_STEPS):
            with self._metrics.phases.lap("data"):
                pass
            with self._metrics.observe(1), self._metrics.phases.lap("forward_backward"):
                pass
            with self._metrics.observe_update(), self._metrics.phases.lap("optimizer"):
                pass
            self._metrics.after_step(self._state, result)
        return (time.perf_counter() - started) / _BOOKKEEPING_STEPS

    def _bare(self) -> None:
        self._engine.measure(self._engine.forward_backward(self._batches))
        self._engine.step(self._config.optimizer.lr)

    def _parts(self, geometry: bool) -> None:
        every = self._config.logging.every
        with self._metrics.observe(every) if geometry else contextlib.nullcontext():
            share = self._engine.forward_backward(self._batches)
        self._engine.measure(share)
        with contextlib.nullcontext() if geometry else self._norms.recording():
            self._engine.step(self._config.optimizer.lr)

    def _watched(self, step: int) -> None:
        """As the training loop takes it, with results of the steps since the last log step to write."""
        config, engine, metrics, state = self._config, self._engine, self._metrics, self._state
        started = time.perf_counter()
        with metrics.phases.lap("data"):
            pass
        with metrics.observe(step), metrics.phases.lap("forward_backward"):
            share = engine.forward_backward(self._batches)
        measured = engine.measure(share)
        with metrics.observe_update(), metrics.phases.lap("optimizer"):
            engine.step(config.optimizer.lr)
        result = StepResult(measured.loss, measured.grad_norm, config.optimizer.lr)
        for state.step in range(step - config.logging.every + 1, step + 1):
            state.tokens += tokens_per_step(config)
            state.train_seconds += time.perf_counter() - started
            metrics.after_step(state, result)


def run(arguments: argparse.Namespace) -> Report:
    """Build, warm up, time.

    Raises:
        UserError: several processes.
    """
    launch = launched_alone("logging")
    config = bench_config(PRESETS[arguments.preset], arguments.precision, arguments.micro_batch)
    train = config.train.model_copy(update={"steps": _FAR})
    off = {"checkpoint": config.checkpoint.model_copy(update={"every": 0}), "train": train}
    config = config.model_copy(update=off | {"validation": config.validation.model_copy(update={"every": 0})})
    place = parallel.start(launch, config.parallel, config.train.seed)
    quiet = contextlib.redirect_stdout(io.StringIO())  # a log step's line costs its time, but is not to be read here
    with tempfile.TemporaryDirectory(prefix="logging-") as folder, quiet:
        watched = Watched(config, place, Path(folder))
        turns = watched.turns()
        for _ in range(WARM_UP_STEPS):
            for turn in turns.values():
                turn()
        timings = pairs.interleave(turns, arguments.rounds, synchronizer(place.device))
        between = watched.seconds_between()
    parallel.stop()
    every = config.logging.every
    step = pairs.spread([timing.wall for timing in timings[BARE]]).median
    shares = {
        name: pairs.spread([(ratio - 1 + (every - 1) * between / step) / every for ratio in _ratios(timings, clock)])
        for name, clock in (("by the clock", pairs.wall), ("by CPU time", pairs.cpu))
    }
    results = {
        "share_of_step_time": {name: dataclasses.asdict(share) for name, share in shares.items()},
        "seconds_between": between,
        "rounds": {name: [dataclasses.asdict(timing) for timing in turns] for name, turns in timings.items()},
    }
    settings = {"preset": arguments.preset, "every": every, "precision": arguments.precision}
    return Report(_describe(arguments.preset, config, timings, between, shares), results, settings)


def _ratios(timings: pairs.Rounds, clock: Callable[[pairs.Timing], float]) -> list[float]:
    """A log step's time over an unwatched step's, by round."""
    return [clock(mine) / clock(bare) for mine, bare in zip(timings[LOG_STEP], timings[BARE], strict=True)]


def _describe(
    preset: str, config: Config, timings: pairs.Rounds, between: float, shares: dict[str, pairs.Spread]
) -> str:
    rows = []
    for name, turns in timings.items():
        wall = pairs.spread([timing.wall for timing in turns])
        by_clock, by_cpu = (pairs.ratio(timings, name, BARE, seconds) for seconds in (pairs.wall, pairs.cpu))
        rows.append(
            [
                name,
                f"{wall.median * 1e3:.1f}",
                f"{by_clock.median:.3f}",
                f"{by_clock.lower_quartile:.3f}-{by_clock.upper_quartile:.3f}",
                f"{by_cpu.median:.3f}",
                f"{by_cpu.lower_quartile:.3f}-{by_cpu.upper_quartile:.3f}",
            ]
        )
    head = ["", "ms/step", f"/ {BARE}", "quartiles", "by CPU time", "quartiles"]
    told = [
        f"  {name}: {share.median:.2%} of the step time (quartiles {share.lower_quartile:.2%} to "
        f"{share.upper_quartile:.2%})"
        for name, share in shares.items()
    ]
    model = config.model
    return (
        f"{preset}: {model.num_layers} layers x {model.hidden_size}, {GEONORM}, {config.train.precision}, "
        f"{tokens_per_step(config)} tokens a step; rounds: {len(timings[BARE])}\n\n{table(head, rows)}\n\n"
        f"a step between log steps: {between * 1e6:.0f} microseconds of bookkeeping\n"
        f"all logging at logging.every={config.logging.every}:\n"
        + "\n".join(told)
        + ("" if torch.cuda.is_available() else pairs.doubt(timings, torch.get_num_threads()))
    )
