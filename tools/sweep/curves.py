"""What a run left behind: its curves, how it ended, and how long it took."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.checkpoint import store
from tools.sweep.results import Curve, Status

MOST_POINTS = 100
_REFUSED = 2  # the trainer's exit status after a one-line error


@dataclass(frozen=True)
class Curves:
    """Step -> value of a run, as in its TensorBoard files; ``last_point`` is a Unix time, 0 without any point."""

    loss: dict[int, float]
    grad_norm: dict[int, float]
    validation: dict[int, float]
    last_point: float
    bits_per_byte: dict[int, float] = field(default_factory=dict)

    def steps_not_finite(self) -> list[int]:
        """Steps whose loss or gradient norm was not finite."""
        return [step for step, loss in self.loss.items() if not math.isfinite(loss + self.grad_norm[step])]

    def grad_norm_max(self) -> float | None:
        """The largest finite gradient norm."""
        return max((norm for norm in self.grad_norm.values() if math.isfinite(norm)), default=None)


def read_curves(run_dir: Path) -> Curves:
    """Read the TensorBoard files of a run; empty curves where there are none."""
    if not (run_dir / "tensorboard").is_dir():
        return Curves({}, {}, {}, 0.0)
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = events.Tags()["scalars"]
    tags = ("train/loss", "train/grad_norm", "validation/loss", "validation/bits_per_byte")
    points = {tag: events.Scalars(tag) if tag in found else [] for tag in tags}
    loss, grad_norm, validation, bits = ({point.step: point.value for point in curve} for curve in points.values())
    last_point = max((point.wall_time for curve in points.values() for point in curve), default=0.0)
    return Curves(loss, grad_norm, validation, last_point, bits)


def judge(
    curves: Curves, exit_status: int, last_line: str, steps: int, unigram_entropy: float, margin: float
) -> tuple[Status, str | None]:
    """How a run ended, and in one line why it did not finish.

    Diverged: the trainer stopped at a loss or gradient norm that was not finite, or the final validation loss is not
    finite or above the unigram entropy of the validation text by more than ``margin`` (nats per token).

    Args:
        exit_status: of the trainer; negative after a signal.
        last_line: of its output.
        steps: that the run was to take.
    """
    reached = max(curves.loss, default=0)
    if exit_status:
        if exit_status == _REFUSED and reached in curves.steps_not_finite():
            return "diverged", f"loss or gradient norm not finite at step {reached}; the trainer stopped"
        return "failed", f"exit status {exit_status} after step {reached}: {last_line.removeprefix('error: ')}"
    if reached != steps or steps not in curves.validation:
        return "failed", f"it ended at step {reached} of {steps}, without a final validation loss"
    final = curves.validation[steps]
    if not math.isfinite(final):
        return "diverged", "the final validation loss is not finite"
    if final > unigram_entropy + margin:
        return "diverged", (
            f"the final validation loss {final:.4f} is above the unigram entropy {unigram_entropy:.4f} "
            f"by more than {margin}"
        )
    return "finished", None


def thinned(curve: dict[int, float]) -> Curve:
    """(last step, mean) of at most ``MOST_POINTS`` stretches of the same length; the last one may be shorter."""
    points = sorted(curve.items())
    length = math.ceil(len(points) / MOST_POINTS) or 1
    stretches = [points[first : first + length] for first in range(0, len(points), length)]
    return [(stretch[-1][0], finite(sum(value for _, value in stretch) / len(stretch))) for stretch in stretches]


def finite(value: float) -> float | None:
    """JSON knows no infinity and no NaN."""
    return value if math.isfinite(value) else None


def training_seconds(run_dir: Path, started: float, last_point: float) -> float:
    """By the newest checkpoint: seconds in training steps; without one, from ``started`` to the last point."""
    checkpoint = store.newest(store.checkpoint_folder(run_dir))
    if checkpoint is None:
        return round(max(0.0, last_point - started), 1)
    return round(float(store.read_record(checkpoint)["state"]["train_seconds"]), 1)
