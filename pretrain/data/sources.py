"""Remote folders: one call that opens a file there at any byte, whatever the protocol, and three kinds of failure."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from pretrain.data.urls import REMOTE_SCHEMES, scheme_of
from pretrain.errors import UserError

# What a broken connection had not filled of a chunk is lost.
CHUNK_BYTES = 1 << 17

# Answers after which the same question may well be answered: overload, restarts, proxies without their server.
_PASSING_STATUS = (408, 425, 429)
_DISTRUST = re.compile(r"certificate verify failed: ([^(]*)", re.IGNORECASE)


class TransientError(Exception):
    """The source did not answer or the connection broke; trying again may help."""


class RefusedError(UserError):
    """The source answered, and will answer the same again."""


@dataclass(frozen=True)
class Body:
    """The bytes of a remote file from some place on.

    Attributes:
        start: where they begin; 0 where a server does not know ranges, whatever was asked for.
        total: bytes of the whole file, where the source says it.
        chunks: of at most ``CHUNK_BYTES``; raises TransientError where the connection breaks or stalls.
    """

    start: int
    total: int | None
    chunks: Iterator[bytes]


class Source(Protocol):
    """A folder on a server. Its methods may be called from several threads."""

    def open(self, name: str, start: int) -> AbstractContextManager[Body]:
        """The file of that name from byte ``start`` on.

        Raises:
            TransientError: no connection, or an answer that may pass.
            RefusedError: it is not there, or not for us.
        """

    def describe(self, name: str) -> str:
        """The file's URL without passwords and tokens."""


def open_source(folder: str, read_timeout: float) -> Source:
    """The source of a folder's URL; nothing is asked of the server yet.

    Args:
        folder: as :func:`pretrain.data.urls.split_url` gives it.
        read_timeout: seconds without a byte after which a connection counts as broken.

    Raises:
        UserError: the URL cannot be used.
    """
    return _OPENERS[scheme_of(folder)](folder, read_timeout)


def failure(status: int, description: str, reason: str) -> Exception:
    """What an HTTP status other than success means for the file of that description."""
    if status in _PASSING_STATUS or status >= 500:
        return TransientError(f"{status} {reason}".strip())
    advice = {
        401: "give credentials",
        403: "see that the credentials are right and may read it",
        404: "see that the URL is right and the file is there",
    }.get(status, "see that the URL is right")
    return RefusedError(f"{description}: the server answers {status} {reason}".rstrip() + f"; {advice}")


def distrusted(error: Exception, description: str, variable: str) -> RefusedError | None:
    """What a failed connection is when the server's certificate is why: trying again would change nothing."""
    found = _DISTRUST.search(str(error))
    if not found:
        return None
    return RefusedError(
        f"{description}: the server's certificate is not trusted ({found[1].strip()}); name the file of its authority "
        f"by {variable}"
    )


def _open_http(folder: str, read_timeout: float) -> Source:
    from pretrain.data.source_http import HttpSource

    return HttpSource(folder, read_timeout)


def _open_s3(folder: str, read_timeout: float) -> Source:
    from pretrain.data.source_s3 import S3Source  # late: boto3 takes half a second

    return S3Source(folder, read_timeout)


_OPENERS: dict[str, Callable[[str, float], Source]] = {"http": _open_http, "https": _open_http, "s3": _open_s3}
assert tuple(_OPENERS) == REMOTE_SCHEMES
