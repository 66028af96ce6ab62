"""What a run remembers of its spikes, in every checkpoint."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.checkpoint.record import Count, Positive
from pretrain.config import SpikeSettings
from pretrain.state import TrainState

NAME = "spikes"
"""Of the memory in :attr:`TrainState.callbacks`."""


@dataclass(frozen=True)
class Rollback:
    """A rollback that was made.

    Attributes:
        at: step of the spike.
        to: step of the checkpoint that the run went back to.
        first, count: the window of global draws that is never taken.
    """

    at: Count
    to: Count
    first: Count
    count: Positive


def rollbacks(state: TrainState) -> list[Rollback]:
    """Those that led to this state, in order."""
    return [Rollback(**made) for made in state.callbacks.get(NAME, {}).get("rollbacks", [])]


def remember(
    state: TrainState, made: Sequence[Rollback], detector: dict[str, Any], layers: list[dict[str, Any]]
) -> None:
    """Have the next checkpoint hold them: rollbacks, what the detector knows, and the layers' last measurements."""
    state.callbacks[NAME] = {"rollbacks": [asdict(one) for one in made], "detector": detector, "layers": layers}


def take_up(state: TrainState, recorded: Sequence[Rollback]) -> None:
    """Let a state from a checkpoint know of rollbacks that were made since: their windows are still to be left out.

    Args:
        recorded: rollbacks of this run, in order.
    """
    known = rollbacks(state)
    missing = [
        one for one in recorded if one not in known and one.first >= state.data.next_draw(state.consumed_samples)
    ]
    if not missing:
        return
    for one in missing:
        state.data.skip(one.first, one.count, state.consumed_samples)
    memory = state.callbacks.setdefault(NAME, {})
    memory["rollbacks"] = [asdict(one) for one in (*known, *missing)]


def lr_factor(made: Sequence[Rollback], step: int, settings: SpikeSettings) -> float:
    """What the learning rate of 1-based ``step`` is multiplied by."""
    return settings.lr_factor if any(one.to < step <= one.at + settings.lr_steps for one in made) else 1.0


def too_many(made: Sequence[Rollback], step: int, settings: SpikeSettings) -> bool:
    """Whether another rollback at ``step`` is one more than the settings allow."""
    return sum(abs(step - one.at) < settings.within_steps for one in made) >= settings.max_rollbacks
