"""The bytes of one tar, from a disk or a server, in one pass and without a copy."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

from pretrain.data.sources import RefusedError, Source, TransientError, open_source
from pretrain.data.tar_census import TarCensus
from pretrain.data.transfer import Patience, Waiting
from pretrain.data.urls import is_remote, local_path, split_url
from pretrain.errors import UserError
from pretrain.redaction import redact

_CHUNK_BYTES = 1 << 17
# tarfile would unpack them, but nothing can be found in a damaged one.
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}


class Readable(Protocol):
    """A file that is read from its beginning to its end."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` more bytes; none at the end."""

    def close(self) -> None:
        """Let go of it."""


class RemoteFile:
    """A file on a server; where the connection breaks, it is taken up again."""

    def __init__(self, source: Source, name: str, patience: Patience) -> None:
        """Ask nothing of the server yet."""
        self._source = source
        self._name = name
        self._patience = patience
        self._connection = ExitStack()
        self._chunks: Iterator[bytes] | None = None
        self._total: int | None = None
        self._have = 0
        self._ready = b""
        self._at_end = False

    def read(self, size: int, /) -> bytes:
        """At most ``size`` more bytes.

        Raises:
            RefusedError: the source refuses, stays away, or its file has changed.
        """
        waiting = Waiting(self._patience, self._source.describe(self._name))
        while not self._ready and not self._at_end:
            try:
                self._receive()
            except TransientError as error:
                self.close()
                waiting.pause(self._have, str(error))
        part, self._ready = self._ready[:size], self._ready[size:]
        return part

    def close(self) -> None:
        """End the connection; reading on begins another."""
        self._connection.close()
        self._chunks = None

    def _receive(self) -> None:
        """The next chunk into ``_ready``, or know that there is none."""
        if self._chunks is None:
            self._chunks = self._connect()
        chunk = next(self._chunks, b"")
        self._have += len(chunk)
        self._ready = chunk
        if chunk:
            return
        if self._total is not None and self._have < self._total:
            raise TransientError("the connection ended early")
        self._at_end = True
        self.close()

    def _connect(self) -> Iterator[bytes]:
        body = self._connection.enter_context(self._source.open(self._name, self._have))
        if self._total is not None and body.total not in (None, self._total):
            raise RefusedError(
                f"{self._source.describe(self._name)}: it had {self._total} bytes and now has {body.total}; "
                "shards must not change while a run reads them"
            )
        self._total = body.total if self._total is None else self._total
        return _without(body.chunks, self._have - body.start)


def _without(chunks: Iterator[bytes], count: int) -> Iterator[bytes]:
    """What a server that knows no ranges sends again is passed over."""
    for chunk in chunks:
        if count < len(chunk):
            yield chunk[count:]
        count = max(0, count - len(chunk))


class ShardBytes:
    """What webdataset reads a tar from: every byte also passes by a census.

    Attributes:
        where: the place, for messages.
        census: of what was read so far.
        fault: why reading failed; webdataset swallows what is raised, and changes its words.
    """

    def __init__(self, file: Readable, where: str) -> None:
        self.where = where
        self.census = TarCensus()
        self.fault: str | None = None
        self._file = file
        self._begun = False

    def __enter__(self) -> "ShardBytes":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def read(self, size: int = _CHUNK_BYTES) -> bytes:
        """At most ``size`` more bytes; UserError, also in :attr:`fault`, when they cannot be had."""
        try:
            chunk = self._file.read(size)
            if not self._begun:
                self._begun = True
                self._refuse_compression(chunk)
        except OSError as error:
            self.fault = f"shard {self.where} cannot be read: {error.strerror}"
            raise UserError(self.fault) from error
        except UserError as error:
            self.fault = str(error)
            raise
        self.census.feed(chunk)
        return chunk

    def drain(self) -> None:
        """Read what is left, for the census alone."""
        while self.read():
            pass
        self.census.finish()

    def _refuse_compression(self, chunk: bytes) -> None:
        for magic, name in _COMPRESSIONS.items():
            if chunk.startswith(magic):
                raise UserError(
                    f"shard {self.where} is compressed ({name}); data.mode=stream reads plain tars, unpack it"
                )


class Opener:
    """Opens shards by their place; connections to a server are shared."""

    def __init__(self, patience: Patience) -> None:
        """Have a source that stays away for as long as ``patience`` says given up."""
        self._patience = patience
        self._sources: dict[str, Source] = {}

    def open(self, place: str) -> ShardBytes:
        """A shard from its first byte on.

        Raises:
            UserError: a local one is not there, or the URL cannot be used; a server is not asked before the first read.
        """
        if is_remote(place):
            folder, name = split_url(place)
            if folder not in self._sources:
                self._sources[folder] = open_source(folder, self._patience.read_timeout)
            return ShardBytes(RemoteFile(self._sources[folder], name, self._patience), redact(place))
        try:
            return ShardBytes(local_path(place).open("rb", buffering=0), place)
        except OSError as error:
            raise UserError(f"shard {place} cannot be read: {error.strerror}; see data.urls") from error


def require_local_shards(places: list[str]) -> None:
    """See that those on a disk are there; UserError names the first that is not."""
    for place in places:
        if not is_remote(place) and not local_path(place).is_file():
            raise UserError(f"shard {place} does not exist; see data.urls and data.validation_urls")
