"""A callback whose time is counted."""

from pretrain.loop import Callback
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.phases import Phases
from pretrain.state import TrainState


class Timed:
    """The same callback; its time belongs to a phase."""

    def __init__(self, phase: str, callback: Callback, phases: Phases) -> None:
        self._phase, self._callback, self._phases = phase, callback, phases

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """The callback's."""
        with self._phases.lap(self._phase):
            self._callback.after_step(state, result)
