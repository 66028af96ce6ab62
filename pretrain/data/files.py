"""Small file operations that the shard format relies on."""

import hashlib
import os
from pathlib import Path

PARTIAL_SUFFIX = ".tmp"


def partial_path(path: Path) -> Path:
    """Where a file is written before it is complete; the final name appears only by a rename."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def publish(path: Path) -> None:
    """Rename the complete partial file of ``path`` to its final name, once its bytes are on disk."""
    partial = partial_path(path)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file so that under its final name it is either complete or absent."""
    partial_path(path).write_bytes(content)
    publish(path)


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file's bytes in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
