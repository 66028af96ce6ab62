"""How far a run is in its data: the little that a checkpoint keeps, the same on all ranks."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.cursor import Cursor
from pretrain.data.mixture import Share, Stage


@dataclass
class DataProgress:
    """What decides, with the seed and the shards, which samples come next; the count of consumed samples stands apart.

    Attributes:
        stages: of the mixture, in order.
        skipped: (first, count) of global draws that are never taken, in order and apart from one another.
        bad_samples: unreadable samples so far, which were masked.
        stream: where each data-parallel rank's next sample begins, in data.mode=stream; empty else.
    """

    stages: list[Stage] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)
    bad_samples: int = 0
    stream: list[Cursor] = field(default_factory=list)

    def draws(self, consumed_samples: int, count: int) -> npt.NDArray[np.int64]:
        """The global draws of the next ``count`` samples, int64 ``[count]``, rising."""
        draws = np.arange(consumed_samples, consumed_samples + count, dtype=np.int64)
        for first, length in self.skipped:
            draws[draws >= first] += length
        return draws

    def next_draw(self, consumed_samples: int) -> int:
        """The global draw of the next sample."""
        return int(self.draws(consumed_samples, 1)[0])

    def skip(self, first: int, count: int, consumed_samples: int) -> None:
        """Never take the global draws [first, first + count); call it alike on all ranks, between two steps.

        Raises:
            ValueError: some of them were taken already, or the window is empty.
        """
        if count < 1:
            raise ValueError(f"a window of {count} draws")
        if consumed_samples and first <= (last := int(self.draws(consumed_samples - 1, 1)[0])):
            raise ValueError(f"draw {first} lies in the past: {last} was taken already")
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self.skipped, (first, count)]):
            if merged and begin <= sum(merged[-1]):
                begin, length = merged[-1][0], max(sum(merged[-1]), begin + length) - merged[-1][0]
                merged.pop()
            merged.append((begin, length))
        self.skipped = merged

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "DataProgress":
        """What :meth:`to_dict` gave, also after a way through JSON."""
        return cls(
            stages=[
                Stage(stage["start"], tuple(Share(**share) for share in stage["shares"])) for stage in content["stages"]
            ],
            skipped=[(first, count) for first, count in content["skipped"]],
            bad_samples=content["bad_samples"],
            stream=[Cursor(**cursor) for cursor in content.get("stream", [])],
        )
