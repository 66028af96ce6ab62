"""A file of TensorBoard events that outlives a full disk.

TensorBoard's own writer ends for ever at its first failed write, with a part of a record in its file. Here what could
not be written is kept and goes out, in its place, as soon as the file system takes it.
"""

import contextlib
import io
import itertools
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter

MOST_KEPT = 64 << 20
"""Bytes that wait for a disk; beyond them all that waits is given up."""
_NUMBERS = itertools.count()
"""Of the files of this process: TensorBoard reads those of one second in the order of their names."""


class EventFile:
    """A new event file in ``folder``, which is made; every event is handed to the operating system at once."""

    def __init__(self, folder: Path, purge_from: int) -> None:
        """Begin; points of older files at steps from ``purge_from`` on count no more.

        Raises:
            OSError: the folder cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS):06d}"
        self.path = folder / name
        self._kept = io.BytesIO()
        self._records = RecordWriter(self._kept)
        self._size = 0
        self._file: io.FileIO | None = None
        self._failed = False
        self.add(Event(file_version="brain.Event:2"), purge_from)
        self.purge(purge_from)

    def add(self, event: Event, step: int, at: float | None = None) -> None:
        """Write an event of ``step`` and of the Unix time ``at``, by default now; it waits where others do."""
        event.step, event.wall_time = step, time.time() if at is None else at
        self._records.write(event.SerializeToString())
        if not self._failed:
            self.flush()

    def purge(self, step: int) -> None:
        """Points before this at steps from ``step`` on count no more."""
        self.add(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def flush(self) -> None:
        """Write what waits, or say once that it waits, and once that it does no more."""
        if not self._kept.tell():
            return
        try:
            self._write(self._kept.getvalue())
        except OSError as error:
            self._refused(error)
            return
        self._forget()
        if self._failed:
            self._failed = False
            print(f"{self.path}: the curves are written again", flush=True)

    def close(self) -> None:
        """Write what waits and close the file."""
        self.flush()
        if self._kept.tell():
            print(f"warning: {self.path}: the last curves could not be written", flush=True)
        if self._file is not None:
            self._file.close()

    def _write(self, content: bytes) -> None:
        """All of it, behind what is written already: a part of it that went out before is written over."""
        if self._file is None:
            self._file = io.FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        self._file.seek(self._size)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._size += len(content)

    def _refused(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            print(f"warning: {self.path}: {error.strerror}; the curves are kept until they can be written", flush=True)
        if self._file is not None:
            # A reader must not meet a part of a record; the next try opens the file anew, which may have been gone.
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        if self._kept.tell() > MOST_KEPT:
            print(f"warning: {self.path}: the curves since then are given up", flush=True)
            self._forget()

    def _forget(self) -> None:
        self._kept.seek(0)
        self._kept.truncate()
