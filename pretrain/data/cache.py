"""A bounded folder of verified files that the processes of a node share, each named by the sha256 of its content.

``files/<sha256>`` is complete and verified. ``parts/<sha256>.<bytes>`` is a download, begun or broken off; ``<bytes>``
of the bound are set aside for it. Locks (flock) live on the files themselves and end with their process:

- who downloads holds the part exclusively, so a node downloads a file once, and what a killed process leaves behind is
  taken up by the next;
- who reads holds the file shared, so nothing in use is evicted;
- who makes room, or begins a part, holds ``.lock``.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from pretrain.data.transfer import Patience, RemoteFile, Waiting, download
from pretrain.errors import UserError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_OURS = re.compile(r"[0-9a-f]{64}(\.\d+)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Lease:
    """A file that stays where it is until the lease is closed or forgotten.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, file: FileIO | None = None) -> None:
        """Hold ``file``, open and locked; a file outside the cache needs none."""
        self.path = path
        self._file = file

    def close(self) -> None:
        """Let the file be evicted."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class _Kept:
    """A file in the cache, and the bytes it counts for."""

    path: Path
    counts: int
    last_use: float
    complete: bool


class Cache:
    """The folder, for one process; its threads may share the object."""

    def __init__(self, folder: Path, limit_bytes: int, patience: Patience) -> None:
        """Make the folder.

        Args:
            folder: on a disk of the node itself.
            limit_bytes: of all files together, those in use and those on their way included.
            patience: how long a file may take without a new byte.

        Raises:
            UserError: the folder cannot be written.
        """
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._patience = patience
        self._files, self._parts = folder / "files", folder / "parts"
        with self._explained():
            self._files.mkdir(parents=True, exist_ok=True)
            self._parts.mkdir(exist_ok=True)
            with self._locked():
                pass

    def fetch(self, wanted: RemoteFile) -> Lease:
        """The verified file, from the cache or from its source; waits for another process that is bringing it.

        Raises:
            UserError: the source refuses, stays away or gives other content; the cache cannot be written, or what is in
                use fills it.
        """
        part = self._part(wanted)
        waiting = Waiting(self._patience, wanted.description)
        with self._explained():
            while True:
                lease = self._lease(wanted)
                if lease:
                    return lease
                if not self._bring(wanted):
                    waiting.pause(_size(part), self._reason(part))

    def fetch_ahead(self, wanted: RemoteFile) -> None:
        """Bring a file that will be wanted soon, unless another process does or there is no room; raises as fetch."""
        with self._explained():
            if not self._file(wanted).exists():
                self._bring(wanted)

    def discard(self, wanted: RemoteFile) -> None:
        """Forget a file whose content has gone bad on this disk; its readers keep what they have open."""
        with self._explained():
            self._file(wanted).unlink(missing_ok=True)

    def _file(self, wanted: RemoteFile) -> Path:
        return self._files / _require_sha256(wanted)

    def _part(self, wanted: RemoteFile) -> Path:
        return self._parts / f"{_require_sha256(wanted)}.{wanted.at_most}"

    def _lease(self, wanted: RemoteFile) -> Lease | None:
        """The complete file, locked against eviction, if it is there."""
        path = self._file(wanted)
        try:
            file = FileIO(path, "rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if not _is(path, file):
            file.close()
            return None
        if wanted.size not in (None, os.fstat(file.fileno()).st_size):
            file.close()
            path.unlink(missing_ok=True)  # cut off on this disk since it was verified
            return None
        os.utime(file.fileno())
        return Lease(path, file)

    def _bring(self, wanted: RemoteFile) -> bool:
        """Download a file that is not there; False when another process is at it, or there is no room for it."""
        part = self._part(wanted)
        file = self._claim(part, wanted)
        if file is None:
            return False
        with file:
            if not self._file(wanted).exists():
                download(wanted, file, self._patience, partial(_tell, part))
                part.replace(self._file(wanted))
                _sync_folder(self._files)
            part.unlink(missing_ok=True)
            _why(part).unlink(missing_ok=True)
        return True

    def _claim(self, part: Path, wanted: RemoteFile) -> FileIO | None:
        """The part, open and held by this call alone."""
        if wanted.at_most > self.limit_bytes:
            raise UserError(
                f"data.cache_gb={self.limit_bytes / 1e9:.3g} is smaller than {wanted.description} "
                f"({wanted.at_most / 1e9:.3g} GB); raise it"
            )
        with self._locked():
            if not part.exists() and not self._make_room(wanted.at_most):
                return None
            file = FileIO(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
            # Whoever finishes a part renames it without .lock, so the one just opened may be no part any more.
            if _try_lock(file) and _is(part, file):
                return file
            file.close()
            return None

    def _make_room(self, count: int) -> bool:
        """Evict what was used longest ago and is not in use, downloads broken off first, until ``count`` bytes fit."""
        kept = sorted(self._kept(), key=lambda one: (one.complete, one.last_use))
        excess = sum(one.counts for one in kept) + count - self.limit_bytes
        for one in kept:
            if excess <= 0:
                break
            if _evict(one.path):
                excess -= one.counts
        return excess <= 0

    def _kept(self) -> Iterator[_Kept]:
        for folder in (self._files, self._parts):
            for path in folder.iterdir():
                if not _OURS.fullmatch(path.name):
                    continue  # what a process is told, or a file that others put here, as NFS does with removed ones
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue  # a download that ended since the folder was listed
                complete = folder == self._files
                counts = found.st_size if complete else int(path.suffix[1:] or 0)
                yield _Kept(path, counts, found.st_mtime, complete)

    def _reason(self, part: Path) -> str:
        """Why a file that this process wants is not here yet."""
        if not part.exists():
            return f"all of data.cache_gb={self.limit_bytes / 1e9:.3g} is in use; raise it"
        try:
            return _why(part).read_text(encoding="utf-8")
        except FileNotFoundError:
            return "another process of this node is downloading it"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the file system in one line."""
        try:
            yield
        except OSError as error:
            advice = (
                "free space there or lower data.cache_gb"
                if error.errno in _FULL
                else "choose another folder by data.cache_dir"
            )
            raise UserError(f"data.cache_dir={self.folder} cannot be used: {error.strerror}; {advice}") from error


def _require_sha256(wanted: RemoteFile) -> str:
    """The hash, which becomes a file name here and came from a stranger."""
    if not _SHA256.fullmatch(wanted.sha256):
        raise UserError(f"{wanted.description}: its manifest gives {wanted.sha256[:80]!r}, which is no sha256")
    return wanted.sha256


def _why(part: Path) -> Path:
    """Where who downloads a part tells those who wait for it what went wrong last."""
    return part.with_suffix(part.suffix + ".why")


def _tell(part: Path, fault: str) -> None:
    _why(part).write_text(fault, encoding="utf-8")


def _evict(path: Path) -> bool:
    """Remove a file that nobody holds; whether it is gone."""
    try:
        file = FileIO(path, "rb")
    except FileNotFoundError:
        return True
    with file:
        if not _try_lock(file) or not _is(path, file):
            return False
        path.unlink()
        _why(path).unlink(missing_ok=True)
    return True


def _try_lock(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, file: FileIO) -> bool:
    """Whether an open file is still what lies under a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
