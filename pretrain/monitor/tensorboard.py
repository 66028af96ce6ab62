"""The one TensorBoard writer of a run."""

import re
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard.writer import SummaryWriter


class Board:
    """Writes scalars and text on global rank 0 and nothing elsewhere.

    Points of an earlier start of the run at later steps than ``resumed_step`` are purged, so a resumed curve never
    runs twice. TensorBoard honours this only in a run whose first file says so too, hence also on a fresh start.
    """

    def __init__(self, directory: Path, resumed_step: int, global_rank: int) -> None:
        purge_step = resumed_step + 1 if resumed_step else 0
        self._writer = SummaryWriter(str(directory), purge_step=purge_step) if global_rank == 0 else None

    def rewind(self, step: int) -> None:
        """Go on from an earlier ``step``: points at later ones are purged, as on a resume."""
        if self._writer is not None:
            start = Event(session_log=SessionLog(status=SessionLog.START))
            self._writer._get_file_writer().add_event(start, step + 1)  # type: ignore[no-untyped-call]
            self._writer.flush()

    def scalar(self, tag: str, value: float, step: int) -> None:
        """One point of the curve ``tag``."""
        if self._writer is not None:
            self._writer.add_scalar(tag, value, step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A text in Markdown."""
        if self._writer is not None:
            self._writer.add_text(tag, text, step)

    def charts(self, category: str, prefixes: Mapping[str, str]) -> None:
        """Charts of the tab CUSTOM SCALARS, by title; each shows all curves whose tags begin with its prefix."""
        if self._writer is not None:
            charts = {title: ["Multiline", [f"^{re.escape(prefix)}"]] for title, prefix in prefixes.items()}
            self._writer.add_custom_scalars({category: charts})

    def flush(self) -> None:
        """Write everything out, so that a killed run keeps its curves."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
