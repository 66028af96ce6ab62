"""A window of steps under torch.profiler, and what held the GPU's memory meanwhile."""

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.config import Config
from pretrain.monitor.metrics import StepResult
from pretrain.parallel import Place
from pretrain.state import TrainState

_MOST_ALLOCATIONS = 1_000_000
"""Entries of the memory's history, the newest ones: some 100 bytes each on the host."""


class Profiler:
    """Traces ``profile.window`` steps from ``profile.first`` on, on ``profile.global_ranks``; a callback.

    Steps of the window that were taken before the start, or come after the end, are not traced.
    """

    def __init__(self, config: Config, place: Place, state: TrainState) -> None:
        """Begin at once if the next step is in the window; says so once where no memory can be watched."""
        settings = config.profile
        self._first, self._last = settings.first, min(settings.first + settings.window - 1, config.train.steps)
        self._chosen = place.global_rank in settings.global_ranks
        self._place = place
        self._folder = config.run.dir / "profile"
        self._memory = settings.memory and place.device.type == "cuda"
        self._running: profile | None = None
        if settings.memory and not self._memory and place.global_rank == 0:
            print("warning: profile.memory=true watches a GPU's memory, and there is none: no snapshot", flush=True)
        self._begin_if_due(state.step)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """End the window behind its last step or before the run stops; begin it before its first."""
        if self._running is not None and (state.step >= self._last or result.wishes.stop):
            self._end(self._running, state.step)
        self._begin_if_due(state.step)

    def _begin_if_due(self, step: int) -> None:
        """``step`` steps are complete."""
        if not self._chosen or self._running is not None or not self._first <= step + 1 <= self._last:
            return
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._place.device.type == "cuda")
        self._running = profile(activities=activities, record_shapes=True)
        self._running.start()

    def _end(self, running: profile, step: int) -> None:
        running.stop()
        self._running = None
        try:
            self._write(running, f"step-{step:08d}-global-rank-{self._place.global_rank}")
        except OSError as error:
            print(f"warning: no profile: {self._folder} cannot be written: {error.strerror}", flush=True)
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, running: profile, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.json.gz"
        running.export_chrome_trace(str(path))
        print(f"profile: {path}", flush=True)
        if self._memory:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.pickle"))  # type: ignore[no-untyped-call]
