"""What a run knows about itself: the part of its state that is not weights."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from pretrain.data.progress import DataProgress


@dataclass
class TrainState:
    """Progress of a run, saved once in every checkpoint.

    Attributes:
        step: completed steps.
        consumed_samples: samples taken so far, over all data-parallel ranks.
        tokens: tokens consumed so far.
        train_seconds: wall time spent in the training loop, over all restarts.
        began: Unix time of the first start.
        data: what decides which samples come next.
        callbacks: what callbacks remember, each under a name of its own, as JSON values.
    """

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    began: float = field(default_factory=time.time)
    data: DataProgress = field(default_factory=DataProgress)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def advance(self, samples: int, tokens: int, seconds: float) -> None:
        """Count one completed step."""
        self.step += 1
        self.consumed_samples += samples
        self.tokens += tokens
        self.train_seconds += seconds

    @property
    def clock(self) -> float:
        """Unix time, had the run never paused: what the page of curves over tokens counts hours by."""
        return self.began + self.train_seconds

    def become(self, other: "TrainState") -> None:
        """Be where ``other`` is: whoever holds this state goes on from there."""
        for name, value in vars(other).items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "TrainState":
        """What :meth:`to_dict` gave, also after a way through JSON."""
        return cls(**content | {"data": DataProgress.from_dict(content["data"])})
