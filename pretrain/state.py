"""What a run knows about itself: the part of its state that is not weights."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Progress of a run, saved once in every checkpoint.

    Attributes:
        step: completed steps.
        consumed_samples: the data's whole state: global draws taken so far.
        tokens: tokens consumed so far.
        train_seconds: wall time spent in the training loop, over all restarts.
    """

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    train_seconds: float = 0.0

    def advance(self, samples: int, tokens: int, seconds: float) -> None:
        """Count one completed step."""
        self.step += 1
        self.consumed_samples += samples
        self.tokens += tokens
        self.train_seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)
