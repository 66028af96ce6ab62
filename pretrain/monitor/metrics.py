"""Loss, gradients, learning rate, throughput and geometry of the steps, written on log steps only.

No step is without a point on the curve; what is more than its loss and gradient norm is reduced on log steps.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_ext import Geometry, GeometryProbe, ModelSettings
from pretrain.config import Config
from pretrain.engine import Engine
from pretrain.errors import SharedError
from pretrain.monitor.geometry import GeometryCurves
from pretrain.monitor.layer_norms import QUANTITIES, LayerNorms, norm_values
from pretrain.monitor.layout import board_layout
from pretrain.monitor.phases import Phases
from pretrain.monitor.tensorboard import Board
from pretrain.monitor.throughput import Throughput, memory_in_use
from pretrain.resilience.wishes import Wishes
from pretrain.schedule import is_log_step
from pretrain.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What is known of a step, the same on all ranks.

    Attributes:
        loss: nats per token.
        grad_norm: before the clip; inf where it was not finite, so that the update was skipped.
        lr: learning rate of the update.
        wishes: what is to be done at this boundary beside what is due; an evaluation may add to it.
    """

    loss: float
    grad_norm: float
    lr: float
    wishes: Wishes = field(default_factory=Wishes)


@dataclass(frozen=True)
class LogStep:
    """What is measured on log steps alone.

    Attributes:
        gradient_norms: of each layer, then of :data:`pretrain.monitor.tags.PARTS`.
    """

    step: int
    geometry: Geometry
    gradient_norms: list[float]


class Metrics:
    """Collects step results and writes them out. Ranks other than 0 take part in the reductions only.

    Attributes:
        phases: where the time of this rank goes.
        newest: what was measured on the newest log step, on every rank.
    """

    def __init__(self, config: Config, model: ModelSettings, engine: Engine, board: Board) -> None:
        """``model`` has the vocabulary's size."""
        self._config = config
        self._steps = config.train.steps
        self._ramps = config.train.rampup.start is not None
        self._sequence_length = model.sequence_length
        self._engine = engine
        self._board = board
        self._probe = GeometryProbe(engine.module)
        self._geometry = GeometryCurves(model.residual, self._probe)
        self._norms = LayerNorms(engine, model.num_layers)
        self.phases = Phases(engine.place.device)
        place = engine.place
        self._throughput = Throughput.of(model, place.world_size, place.device, config.logging.peak_tflops)
        self._pending: list[StepResult] = []
        self._tokens: list[int] = []
        self._mark = (0.0, 0, 0)
        self._observed = False
        self.newest: LogStep | None = None
        has_mfu = self._throughput.peak_tflops is not None
        board.layout(board_layout(model.num_layers, has_mfu, self._geometry.names, QUANTITIES))

    def start(self, state: TrainState) -> None:
        """Begin here, or go on here after what is pending came to nothing."""
        self._pending.clear()
        self._tokens.clear()
        self._mark = (state.train_seconds, state.tokens, state.step)

    def observe(self, step: int) -> AbstractContextManager[None]:
        """Record the geometry of the forward passes within, if ``step`` is a log step."""
        self._observed = is_log_step(step, self._config)
        return self._probe.recording() if self._observed else nullcontext()

    def observe_update(self) -> AbstractContextManager[None]:
        """Record the norms of the update within, if the passes before it were observed."""
        return self._norms.recording() if self._observed else nullcontext()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Take a step's result; on log steps, and before anything wished for, write out all since the last one."""
        self._pending.append(result)
        self._tokens.append(state.tokens)
        if is_log_step(state.step, self._config) or result.wishes.any:
            self._write(state)

    def _write(self, state: TrainState) -> None:
        losses = [result.loss for result in self._pending]
        norms = [result.grad_norm for result in self._pending]
        observed: dict[str, float] = {}
        if self._observed:
            geometry, norms_of_layers = self._probe.reduce(dist.group.WORLD), self._norms.reduce()
            self.newest = LogStep(state.step, geometry, norms_of_layers[:, QUANTITIES.index("norm")].tolist())
            observed |= self._geometry.values(geometry) | norm_values(norms_of_layers)
        mark = self._mark[1]
        measured = self._throughput_since_the_mark(state)
        tokens_per_second = measured["throughput/tokens_per_second"]
        first = state.step - len(self._pending) + 1
        for step, loss, norm, result in zip(range(first, state.step + 1), losses, norms, self._pending, strict=True):
            self._board.scalars({"train/loss": loss, "train/grad_norm": norm, "train/lr": result.lr}, step)
            behind = state.step - step
            tokens, before = self._tokens[-1 - behind], [mark, *self._tokens][-2 - behind]
            if self._ramps:
                self._board.scalars({"train/global_batch": (tokens - before) / self._sequence_length}, step)
            self._board.scalars_by_tokens(
                {"train/loss_by_tokens": loss},
                tokens,
                state.clock - behind * measured["throughput/seconds_per_step"],
            )
        self._board.scalars(observed | measured | memory_in_use(self._engine.place.device), state.step)
        self._board.flush()
        if self._engine.place.global_rank == 0:
            print(
                f"step {state.step}/{self._steps}  loss {losses[-1]:.4f}  grad_norm {norms[-1]:.3f}  "
                f"lr {self._pending[-1].lr:.3e}  tokens/s {tokens_per_second:,.0f}",
                flush=True,
            )
        broken = steps_not_finite(first, losses, norms)
        if broken and self._engine.place.global_rank == 0:
            print(f"warning: not finite, update skipped, in steps {broken}", flush=True)
        self._pending.clear()
        self._tokens.clear()

    def _throughput_since_the_mark(self, state: TrainState) -> dict[str, float]:
        """Tag -> value over the steps since the last call."""
        seconds, tokens, step = self._mark
        steps = state.step - step
        taken = state.train_seconds - seconds
        self._mark = (state.train_seconds, state.tokens, state.step)
        phases = {f"throughput/seconds_{phase}": taken for phase, taken in self.phases.take(steps).items()}
        return (
            self._throughput.values((state.tokens - tokens) / taken)
            | {"throughput/seconds_per_step": taken / steps}
            | phases
        )


def steps_not_finite(first: int, losses: Sequence[float], norms: Sequence[float]) -> list[int]:
    """Steps, counted from ``first``, whose loss or gradient norm is not finite; their updates were skipped.

    Raises:
        SharedError: all of them are, so the run is beyond repair by itself.
    """
    broken = [
        step
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first)
        if not (math.isfinite(loss) and math.isfinite(norm))
    ]
    if len(broken) == len(losses):
        raise SharedError(
            f"loss or gradient norm was not finite in every step from {broken[0]} to {broken[-1]}; no checkpoint "
            f"was written since; lower optimizer.lr or raise optimizer.warmup_steps, then start again"
        )
    return broken
