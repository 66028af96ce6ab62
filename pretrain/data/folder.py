"""The folder of a data set, on disk or remote: it gives a verified local file for each name in the manifest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from pretrain.data.cache import Cache, Lease
from pretrain.data.prefetch import Prefetcher
from pretrain.data.sources import Source, open_source
from pretrain.data.transfer import Patience, RemoteFile, read_whole
from pretrain.data.urls import require_plain_name, split_url
from pretrain.errors import UserError


@dataclass(frozen=True)
class Entry:
    """A file of a data set, as its manifest describes it.

    Attributes:
        name: a plain file name.
        sha256: of the content, hex.
        size: bytes, where the manifest tells them.
        at_most: bound of the size; what a server sends beyond it is never stored.
    """

    name: str
    sha256: str
    size: int | None
    at_most: int


@dataclass(frozen=True)
class Access:
    """How this process reaches remote folders. Nothing is made on disk before the first of them is opened.

    Attributes:
        cache_dir: see ``data.cache_dir``.
        cache_bytes: see ``data.cache_gb``.
        patience: see ``data.source_timeout_minutes``.
    """

    cache_dir: Path = Path("~/.cache/sphere-pretrain")
    cache_bytes: int = 100 * 10**9
    patience: Patience = field(default_factory=lambda: Patience(600))

    @cached_property
    def cache(self) -> Cache:
        """The node's cache; UserError when it cannot be written."""
        return Cache(self.cache_dir.expanduser(), self.cache_bytes, self.patience)

    def read(self, url: str, at_most: int) -> tuple[bytes, "RemoteFolder"]:
        """A small remote file and its folder; UserError when it cannot be had or is longer than ``at_most`` bytes."""
        place, name = split_url(url)
        source = open_source(place, self.patience.read_timeout)
        return read_whole(source, name, at_most, self.patience), RemoteFolder(source, self.cache)

    def close(self) -> None:
        """Have nobody wait for a source any longer; what is on its way is taken up by the next run."""
        self.patience.ended.set()


class Folder(Protocol):
    """Where the files of a data set lie."""

    @property
    def is_local(self) -> bool:
        """Whether the files are on disks of this machine, and :attr:`directory` names them."""

    @property
    def where(self) -> str:
        """Its place for messages, without passwords and tokens."""

    @property
    def directory(self) -> Path:
        """The folder on this machine's disks; UserError when it is remote."""

    def describe(self, name: str) -> str:
        """A file's place for messages, without passwords and tokens."""

    def hold(self, entry: Entry) -> Lease:
        """The file on a local disk, there until the lease goes.

        Raises:
            UserError: a remote file cannot be had. A local folder promises nothing: opening its files tells.
        """

    def keep(self, entry: Entry) -> Path:
        """The same for as long as this object lives."""

    def expect(self, entries: Sequence[Entry]) -> None:
        """Bring these files in the background, the first ones first."""

    def renew(self, entry: Entry) -> None:
        """Forget a copy of a file that turned out damaged, so that the next :meth:`hold` brings it anew."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a disk of this machine."""

    directory: Path
    is_local = True

    @property
    def where(self) -> str:
        """The folder's path."""
        return str(self.directory)

    def describe(self, name: str) -> str:
        """The file's path."""
        return str(self.directory / name)

    def hold(self, entry: Entry) -> Lease:
        """The file where it is."""
        return Lease(self.directory / require_plain_name(entry.name))

    def keep(self, entry: Entry) -> Path:
        """The file where it is."""
        return self.hold(entry).path

    def expect(self, entries: Sequence[Entry]) -> None:
        """Nothing to bring."""

    def renew(self, entry: Entry) -> None:
        """There is no other copy."""


class RemoteFolder:
    """A folder on a server, seen through the node's cache."""

    is_local = False

    def __init__(self, source: Source, cache: Cache) -> None:
        self._source = source
        self._cache = cache
        self._prefetcher: Prefetcher | None = None
        self._kept: list[Lease] = []

    @property
    def where(self) -> str:
        """The folder's URL."""
        return self._source.describe("manifest.json").rpartition("/")[0]

    @property
    def directory(self) -> Path:
        """There is none; UserError."""
        raise UserError(f"{self.where} is remote; this needs a data set on a local disk: copy it")

    def describe(self, name: str) -> str:
        """The file's URL without passwords and tokens."""
        return self._source.describe(name)

    def hold(self, entry: Entry) -> Lease:
        """The file in the cache; brought there first where it is not."""
        return self._cache.fetch(self._remote(entry))

    def keep(self, entry: Entry) -> Path:
        """The same, never evicted while this object lives."""
        self._kept.append(self.hold(entry))
        return self._kept[-1].path

    def expect(self, entries: Sequence[Entry]) -> None:
        """Bring these into the cache in the background."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._cache)
        self._prefetcher.aim([self._remote(entry) for entry in entries])

    def renew(self, entry: Entry) -> None:
        """Remove the file from the cache."""
        self._cache.discard(self._remote(entry))

    def _remote(self, entry: Entry) -> RemoteFile:
        return RemoteFile(self._source, entry.name, entry.sha256, entry.size, entry.at_most)
