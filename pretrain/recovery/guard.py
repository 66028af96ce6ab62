"""What a run does about its loss spikes: judge every step before its update, then update, skip or go back."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine, Measured
from pretrain.errors import SharedError
from pretrain.feed import Feed
from pretrain.loop import Outcome
from pretrain.monitor.metrics import Metrics, StepResult
from pretrain.monitor.spikes import SIGNALS, Detector, Verdict
from pretrain.monitor.tensorboard import Board
from pretrain.recovery import layers, memory, reports
from pretrain.recovery.describe import Describer
from pretrain.recovery.memory import Rollback
from pretrain.recovery.reports import Report, Signal
from pretrain.recovery.rollback import GoingBack, Target
from pretrain.schedule import learning_rate
from pretrain.state import TrainState


class SpikeGuard:
    """Judges every step, the same on all ranks. As a callback it remembers how the layers stood on log steps."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        board: Board,
        feed: Feed,
        metrics: Metrics,
        describer: Describer,
        back: GoingBack,
        patience: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Begin; ``patience`` gives what is done within more time than a step."""
        self._config, self._settings = config, config.spikes
        self._engine, self._board, self._feed, self._metrics = engine, board, feed, metrics
        self._describer, self._back, self._patience = describer, back, patience
        self._detector = Detector(config.spikes, judge_from=config.optimizer.warmup_steps + 1)
        self._layers: list[dict[str, Any]] = []
        self._rollbacks: list[Rollback] = []
        self._reported: tuple[int, Outcome] | None = None

    def start(self, state: TrainState) -> None:
        """Go on where ``state`` stands, in the curves too."""
        kept = state.callbacks.get(memory.NAME, {})
        self._detector.load_state_dict(kept.get("detector", {}))
        self._layers = list(kept.get("layers", []))
        self._rollbacks = memory.rollbacks(state)
        self._reported = None
        for report in reports.read_all(self._config.run.dir) if self._leads else []:
            if report.step > state.step and report.rollback in self._rollbacks:
                self._mark(report)

    def learning_rate(self, state: TrainState) -> float:
        """Of the update that follows ``state``."""
        scheduled = learning_rate(state.step, self._config.train.steps, self._config.optimizer)
        return scheduled * memory.lr_factor(self._rollbacks, state.step + 1, self._settings)

    def judge(self, state: TrainState, measured: Measured, micro_batches: Sequence[MicroBatch], lr: float) -> Outcome:
        """What becomes of the step that follows ``state``, whose gradients are there; collective.

        Raises:
            SharedError: it calls for a rollback, and that cannot be done or was done too often.
        """
        step = state.step + 1
        verdict = self._detector.judge(step, {"loss": measured.loss, "grad_norm": measured.grad_norm})
        if not verdict.told:
            return Outcome.UPDATE
        with self._patience():
            return self._respond(state, measured, verdict, micro_batches, lr)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Before the step may be saved, and behind the metrics: have ``state`` remember."""
        newest = self._metrics.newest
        if newest is not None and newest.step == state.step and math.isfinite(result.loss):
            now = layers.measurement(state.step, newest.gradient_norms, newest.geometry)
            if layers.is_finite(now):
                self._layers = [*self._layers, now][-layers.KEPT :]
        memory.remember(state, self._rollbacks, self._detector.state_dict(), self._layers)

    @property
    def _leads(self) -> bool:
        return self._engine.place.global_rank == 0

    def _respond(
        self, state: TrainState, measured: Measured, verdict: Verdict, micro_batches: Sequence[MicroBatch], lr: float
    ) -> Outcome:
        acts = verdict.act and self._settings.policy != "log"
        outcome = Outcome.SKIP if acts or not measured.finite else Outcome.UPDATE
        goes_back = acts and self._settings.policy == "rollback"
        targets = self._back.targets(verdict.onset, state) if goes_back else []
        if targets:
            outcome = Outcome.REWOUND
        elif self._reported is not None and self._reported[0] >= verdict.onset and self._reported[1] == outcome:
            return outcome  # the same spike, still on
        self._reported = (state.step + 1, outcome)
        moved, samples = self._describer.describe(state, micro_batches, self._layers)
        signals = {name: _signal(name, measured, verdict) for name in SIGNALS}

        def report(done: str, rollback: Rollback | None = None) -> Report:
            return Report(step, verdict.onset, signals, lr, done, rollback, moved, samples)

        step = state.step + 1
        if targets:
            self._go_back(state, verdict.onset, targets, report)
        else:
            self._tell(report(outcome.value + (": no checkpoint is from before the spike" if goes_back else "")))
        return outcome

    def _go_back(self, state: TrainState, onset: int, targets: Sequence[Target], report: Callable[..., Report]) -> None:
        step = state.step + 1
        if memory.too_many(self._rollbacks, step, self._settings):
            limit = f"spikes.max_rollbacks={self._settings.max_rollbacks} in {self._settings.within_steps} steps"
            self._tell(report(f"the run ended: more than {limit}"))
            raise SharedError(
                f"another spike at step {step}, and there were {limit} before it; read the reports in "
                f"{self._config.run.dir / reports.FOLDER}, then lower optimizer.lr or raise spikes.max_rollbacks"
            )
        made = self._back.go(targets, state, onset)
        self._board.rewind(state.step, state.tokens)
        told = report(
            f"the run went back to step {made.to} and leaves out the {made.count} samples from draw {made.first} on",
            made,
        )
        self._tell(told, number=len(self._rollbacks) + 1)
        rollbacks = [*self._rollbacks, made]
        kept = state.callbacks.get(memory.NAME, {})
        memory.remember(state, rollbacks, kept.get("detector", {}), kept.get("layers", []))
        self.start(state)
        self._feed.start()
        self._metrics.start(state)

    def _tell(self, report: Report, number: int | None = None) -> None:
        """In the run's folder, on the console and in the curves, on global rank 0; ``number`` of a rollback."""
        if not self._leads:
            return
        try:
            where = f"; {reports.write(self._config.run.dir, report, number)}"
        except OSError as error:
            where = f"; its report cannot be written: {error.strerror}"
        print(report.line() + where, flush=True)
        if number is None:
            self._mark(report)

    def _mark(self, report: Report) -> None:
        loss = report.signals["loss"]
        height = loss.median if loss.value is None else loss.value
        if height is not None:
            self._board.scalar("events/spike", height, report.step)
        self._board.text("events/spike_report", report.markdown(), report.step)
        self._board.flush()


def _signal(name: str, measured: Measured, verdict: Verdict) -> Signal:
    numbers = (getattr(measured, name), verdict.centres[name], verdict.scores[name])
    return Signal(*(number if math.isfinite(number) else None for number in numbers))
