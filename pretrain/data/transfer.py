"""Bring one remote file over a connection that breaks, stalls, lies or stays away."""

import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO

from pretrain.data.sources import RefusedError, Source, TransientError

_LONGEST_READ_TIMEOUT = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_WARN_AFTER = 30.0

# A generator of its own: the run's random numbers must not depend on the weather on the network.
_JITTER = random.Random()


@dataclass(frozen=True)
class Patience:
    """How long a source may stay away.

    Attributes:
        timeout: seconds without a new byte after which a file is given up.
        ended: once set, nobody waits any more; so a process that ends does not hang on a source.
    """

    timeout: float
    ended: threading.Event = field(default_factory=threading.Event, compare=False)

    @property
    def read_timeout(self) -> float:
        """Seconds without a byte after which a connection counts as broken: several fit into the whole time."""
        return min(_LONGEST_READ_TIMEOUT, self.timeout / 4)

    @property
    def words(self) -> str:
        """The timeout as text."""
        return f"{self.timeout / 60:.3g} minutes"


class Waiting:
    """Pauses that double from one to the next and end with an error; a byte more than ever before resets both."""

    def __init__(self, patience: Patience, about: str) -> None:
        self._patience = patience
        self._about = about
        self._furthest = -1
        self._restart()

    def _restart(self) -> None:
        self._since = time.monotonic()
        self._tries = 0
        self._warned = False

    def pause(self, reached: int, reason: str) -> None:
        """Sleep before the next try.

        Args:
            reached: bytes that are there now.
            reason: what went wrong.

        Raises:
            RefusedError: ``patience.timeout`` has passed without a new byte, or nobody waits any more.
        """
        if reached > self._furthest:
            self._furthest = reached
            self._restart()
        self._tries += 1
        left = self._since + self._patience.timeout - time.monotonic()
        if left <= 0:
            raise RefusedError(
                f"{self._about}: nothing arrived for {self._patience.words} ({reason}); see that its server can be "
                "reached and start again, or raise data.source_timeout_minutes"
            )
        if not self._warned and self._patience.timeout - left > _WARN_AFTER:
            self._warned = True
            print(f"warning: {self._about}: still trying ({reason})", file=sys.stderr, flush=True)
        longest = min(_LONGEST_PAUSE, self._patience.timeout / 8)
        pause = min(longest, _FIRST_PAUSE * 2 ** min(self._tries - 1, 10))
        if self._patience.ended.wait(min(left, pause * _JITTER.uniform(0.5, 1.0))):
            raise RefusedError(f"{self._about}: not fetched, as the run is ending ({reason})")


@dataclass(frozen=True)
class RemoteFile:
    """One file that a manifest names.

    Attributes:
        source: the folder.
        name: inside the folder.
        sha256: of its content, hex.
        size: its bytes, where known.
        at_most: no more bytes than this are ever taken from the source.
    """

    source: Source
    name: str
    sha256: str
    size: int | None
    at_most: int

    @property
    def description(self) -> str:
        """The URL, for messages."""
        return self.source.describe(self.name)


class _WrongContentError(Exception):
    """What arrives is not the file that was asked for."""


def download(wanted: RemoteFile, file: FileIO, patience: Patience, on_fault: Callable[[str], None]) -> None:
    """Complete a file that may hold the beginning of the content already, and verify it.

    Args:
        wanted: what to bring.
        file: open for reading and writing; synced to disk at the end.
        patience: how long to try.
        on_fault: told of each fault that is tried again.

    Raises:
        RefusedError: the source refuses, stays away, or twice gave content that is not the manifest's.
        OSError: the file cannot be written.
    """
    fault = ""
    if wanted.size is None:
        file.truncate(0)  # there is no telling whether the end is missing, and a server refuses an empty range
    for _ in range(2):
        try:
            _receive(wanted, file, Waiting(patience, wanted.description), on_fault)
            _verify(wanted, file)
            os.fsync(file.fileno())
            return
        except _WrongContentError as error:
            fault = str(error)
            on_fault(fault)
            file.truncate(0)
    raise RefusedError(
        f"{wanted.description}: {fault}, twice; restore the file on the server, or build the data set anew"
    )


def read_whole(source: Source, name: str, at_most: int, patience: Patience) -> bytes:
    """A small file whose sha256 is not known.

    Raises:
        RefusedError: as :func:`download`, or it has more than ``at_most`` bytes.
    """
    waiting = Waiting(patience, source.describe(name))
    content = bytearray()
    while True:
        try:
            content.clear()
            with source.open(name, 0) as body:
                for chunk in body.chunks:
                    content += chunk
                    if len(content) > at_most:
                        raise RefusedError(
                            f"{source.describe(name)}: has more than {at_most} bytes; is it the right file?"
                        )
            if body.total is None or len(content) == body.total:
                return bytes(content)
            raise TransientError("the connection ended early")
        except TransientError as error:
            waiting.pause(len(content), str(error))


def _receive(wanted: RemoteFile, file: FileIO, waiting: Waiting, on_fault: Callable[[str], None]) -> None:
    """Append what is missing until the file has all its bytes."""
    while True:
        have = file.seek(0, os.SEEK_END)
        if have == wanted.size:
            return
        try:
            if _append(wanted, file, have):
                return
            raise TransientError("the connection ended early")
        except TransientError as error:
            on_fault(str(error))
            waiting.pause(file.seek(0, os.SEEK_END), str(error))


def _append(wanted: RemoteFile, file: FileIO, have: int) -> bool:
    """One connection's worth of bytes; whether the source holds no more."""
    with wanted.source.open(wanted.name, have) as body:
        if wanted.size is not None and body.total not in (None, wanted.size):
            raise _WrongContentError(f"it has {body.total} bytes instead of {wanted.size}")
        if body.start != have:  # the server knows no ranges
            have = body.start
            file.truncate(have)
        file.seek(have)
        for chunk in body.chunks:
            have += len(chunk)
            if have > wanted.at_most:
                raise _WrongContentError(f"it has more than {wanted.at_most} bytes")
            _write(file, chunk)
    return have == (body.total if wanted.size is None else wanted.size) or (wanted.size is None and body.total is None)


def _write(file: FileIO, chunk: bytes) -> None:
    """All of a chunk: one write to a disk that is almost full takes a part of it only."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def _verify(wanted: RemoteFile, file: FileIO) -> None:
    file.seek(0)
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted.sha256:
        raise _WrongContentError(f"its sha256 is {found[:12]}..., the manifest says {wanted.sha256[:12]}...")
