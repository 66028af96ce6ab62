"""What a run may be asked to do between two steps, and the files by which its user asks: ``touch RUN/save``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

LOOK_EVERY_SECONDS = 1.0
"""A look costs the shared file system three requests."""


class Stop(IntEnum):
    """Why a run stops before its last step; of several reasons the highest counts.

    A signal alone means that the run is to be started again; whoever asks it to stop means it.
    """

    NO = 0
    SIGNAL = 1
    WISH = 2
    INTERRUPT = 3


@dataclass
class Wishes:
    """What is to be done at this step boundary.

    Attributes:
        stop: save, then end.
        save: save, then go on.
        evaluate: compute the validation loss, then go on.
    """

    stop: Stop = Stop.NO
    save: bool = False
    evaluate: bool = False

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return self.stop != Stop.NO or self.save or self.evaluate

    def numbers(self) -> list[int]:
        """One number a wish; of several processes' numbers the largest count."""
        return [int(self.stop), int(self.save), int(self.evaluate)]

    def add(self, numbers: Sequence[int]) -> None:
        """Take over what another process's :meth:`numbers` ask for."""
        stop, save, evaluate = numbers
        self.stop = max(self.stop, Stop(stop))
        self.save = self.save or bool(save)
        self.evaluate = self.evaluate or bool(evaluate)


class WishFiles:
    """The files ``stop``, ``save`` and ``evaluate`` of a run folder: each is a wish until it is done, then removed.

    One process of a run looks at them.
    """

    NAMES = ("stop", "save", "evaluate")

    def __init__(self, directory: Path, can_evaluate: bool) -> None:
        self._directory = directory
        self._can_evaluate = can_evaluate
        self._taken: set[str] = set()
        self._look_at = 0.0

    def look(self) -> Wishes:
        """The wishes that have come since the last look."""
        if time.monotonic() < self._look_at:
            return Wishes()
        self._look_at = time.monotonic() + LOOK_EVERY_SECONDS
        new = {name for name in self.NAMES if name not in self._taken and (self._directory / name).exists()}
        self._taken |= new
        if "evaluate" in new and not self._can_evaluate:
            self._remove("evaluate", "there is no validation in this run (validation.every=0)")
            new.remove("evaluate")
        return Wishes(Stop.WISH if "stop" in new else Stop.NO, "save" in new, "evaluate" in new)

    def done(self, wishes: Wishes, step: int) -> None:
        """Remove the files of ``wishes``, and say so; a file that comes after this is a new wish."""
        fulfilled = {"stop": wishes.stop == Stop.WISH, "save": wishes.save, "evaluate": wishes.evaluate}
        for name in self.NAMES:
            if fulfilled[name] and name in self._taken:
                self._remove(name, f"done at step {step}")

    def forget(self) -> None:
        """At the end of a run: no file may wait for its next start."""
        for name in self.NAMES:
            if (self._directory / name).exists():
                self._remove(name, "the run had ended before")

    def _remove(self, name: str, outcome: str) -> None:
        path = self._directory / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # Still taken, so that it is not obeyed again at every look.
            print(f"warning: {path}: {outcome}, but the file cannot be removed: {error.strerror}", flush=True)
            return
        self._taken.discard(name)
        print(f"{path}: {outcome}", flush=True)
