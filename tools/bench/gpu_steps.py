"""Training steps of a whole model on one GPU: tokens a second, MFU and peak memory."""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ext import compile_layers
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.monitor.throughput import GIB, Throughput
from pretrain.parallel import Place
from tools.bench import pairs
from tools.bench.contenders import allocated, random_batches, synchronizer, uniform_counts, with_scheme
from tools.bench.step import PRESETS
from tools.bench.step_timing import bench_config, tokens_per_step


@dataclass(frozen=True)
class Case:
    """One row: a scheme, `model.recompute`, and whether train.compile would be set."""

    scheme: str
    recompute: str
    compiled: bool

    def __str__(self) -> str:
        return f"{self.scheme}, {'compiled' if self.compiled else 'not compiled'}, recompute {self.recompute}"


@dataclass(frozen=True)
class Measured:
    """What a case came to.

    Attributes:
        seconds: of a step, the median.
        mfu: None where the device's peak is unknown.
        peak_gib: device memory at the most, weights and optimizer included; 0 on the CPU.
        loss: of the first step after the warm-up, nats per token.
    """

    seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_gib: float
    loss: float


MODELS: Sequence[tuple[str, str]] = [
    ("geonorm", "none"),
    ("pre_norm", "none"),
    ("geonorm", "selective"),
    ("pre_norm", "selective"),
]
"""(scheme, recompute), the most wanted first."""


def configuration(recompute: str, *, tiny: bool) -> Config:
    """configs/geonorm_1p3b.yaml in bf16 with two micro batches of 4 samples, or the same at a tiny size."""
    preset, micro_batch = ("tiny", 2) if tiny else ("1p3b", 4)
    return bench_config(PRESETS[preset], "bf16", micro_batch, f"model.recompute={recompute}")


class Model:
    """One model and its optimizer; leaving the context gives its memory back."""

    def __init__(self, scheme: str, config: Config, place: Place) -> None:
        self.config, self.place = config, place
        self._before = allocated(place.device)
        self._batches: list[MicroBatch] = random_batches(config, place.device)
        self._engine: Engine | None = Engine(config, with_scheme(config.model, scheme), uniform_counts(config), place)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *error: object) -> None:
        self._engine = None
        torch._dynamo.reset()  # else the next model's layers would count as recompilations of these
        gc.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    def compile(self) -> None:
        """As train.compile does."""
        assert self._engine is not None
        compile_layers(self._engine.chunks)

    def step(self) -> torch.Tensor:
        """A whole step; its loss."""
        assert self._engine is not None
        loss = self._engine.forward_backward(self._batches)
        self._engine.step(self.config.optimizer.lr)
        return loss

    def measure(self, steps: int) -> Measured:
        """Warm up twice, then time this many steps."""
        device = self.place.device
        for _ in range(2):
            self.step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        loss = float(self.step())
        seconds = pairs.spread(list(self._timed(steps))).median
        rate = tokens_per_step(self.config) / seconds
        peak = torch.cuda.max_memory_allocated(device) - self._before if device.type == "cuda" else 0
        mfu = Throughput.of(self.config.model, 1, device, None).values(rate).get("throughput/mfu")
        return Measured(seconds, rate, mfu, peak / GIB, loss)

    def _timed(self, steps: int) -> Iterator[float]:
        synchronize = synchronizer(self.place.device)
        for _ in range(steps):
            synchronize()
            start = time.perf_counter()
            self.step()
            synchronize()
            yield time.perf_counter() - start
