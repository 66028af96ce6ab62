"""Which checkpoints of a run are kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint import store
from pretrain.config import CheckpointSettings
from pretrain.errors import UserError


@dataclass(frozen=True)
class Saved:
    """A checkpoint that could be removed.

    Attributes:
        validation_loss: at its step, nats per token; None where it was not measured.
    """

    step: int
    validation_loss: float | None


def expendable(saved: Sequence[Saved], settings: CheckpointSettings) -> list[int]:
    """Steps of the checkpoints that no setting keeps, the oldest first; never that of the newest."""
    if settings.keep_last is None:
        return []
    steps = sorted(checkpoint.step for checkpoint in saved)
    kept = set(steps[-settings.keep_last :])
    if settings.keep_every:
        kept |= {step for step in steps if step % settings.keep_every == 0}
    if settings.keep_best:
        measured = [
            (checkpoint.validation_loss, checkpoint.step)
            for checkpoint in saved
            if checkpoint.validation_loss is not None and math.isfinite(checkpoint.validation_loss)
        ]
        kept |= {step for _, step in sorted(measured)[:1]}
    return [step for step in steps if step not in kept]


def remove_expendable(directory: Path, settings: CheckpointSettings) -> None:
    """Remove what ``settings`` do not keep; those that are damaged or of another version count for nothing and stay.

    Call it when a checkpoint has just become durable.

    Raises:
        OSError: one cannot be removed.
    """
    if settings.keep_last is None:
        return
    found = {}
    for checkpoint in store.checkpoints(directory):
        try:
            state = store.read_record(checkpoint)["state"]
        except UserError:
            continue
        validation = state["callbacks"].get("validation", {})
        measured_here = validation.get("step") == state["step"]
        found[checkpoint] = Saved(state["step"], validation.get("loss") if measured_here else None)
    doomed = expendable(list(found.values()), settings)
    for checkpoint, saved in found.items():
        if saved.step in doomed:
            store.remove(checkpoint)
