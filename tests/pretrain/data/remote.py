"""Remote files for tests."""

import hashlib
import random
from pathlib import Path

from pretrain.data.cache import Cache
from pretrain.data.sources import open_source
from pretrain.data.transfer import Patience, RemoteFile

PATIENCE = Patience(timeout=4)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that are the same for a seed."""
    return random.Random(seed).randbytes(size)


def remote_file(folder_url: str, name: str, content: bytes, patience: Patience = PATIENCE) -> RemoteFile:
    """The file as a manifest that knows its content would name it."""
    source = open_source(folder_url, patience.read_timeout)
    return RemoteFile(source, name, hashlib.sha256(content).hexdigest(), len(content), len(content))


def small_cache(folder: Path, limit_bytes: int = 10_000_000, patience: Patience = PATIENCE) -> Cache:
    """A cache for tests."""
    return Cache(folder / "cache", limit_bytes, patience)


def files_in(cache: Cache) -> dict[str, int]:
    """Name -> bytes of everything in the cache's folder but its lock."""
    return {
        str(file.relative_to(cache.folder)): file.stat().st_size
        for file in cache.folder.rglob("*")
        if file.is_file() and file.name != ".lock"
    }
