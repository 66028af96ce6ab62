"""Which texts there were before: exact deduplication by a hash of 128 bits."""

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.errors import UserError

HASH_BYTES = 16
Hashes = npt.NDArray[np.bytes_]  # "S16"


def hashes_of(contents: list[bytes]) -> Hashes:
    """The hash of each content, bytes ``[contents]``; two of a billion differing ones agree with probability 1e-21."""
    digests = b"".join(hashlib.blake2b(content, digest_size=HASH_BYTES).digest() for content in contents)
    return np.frombuffer(digests, dtype=f"S{HASH_BYTES}")


class SeenTexts:
    """A growing set of hashes, also kept in a file so that an interrupted build can go on.

    It takes 16 bytes a text in memory, twice that while parts are merged, and 16 on disk.
    """

    def __init__(self, file: Path, count: int = 0) -> None:
        """Begin with the first ``count`` hashes of the file; what lies behind them is cut off.

        Raises:
            UserError: the file has not so many.
        """
        self.count = count
        if count and (not file.is_file() or file.stat().st_size < count * HASH_BYTES):
            raise UserError(f"{file} is not as the interrupted build left it: start anew by --force")
        self._file = file.open("r+b" if count else "w+b")
        self._file.truncate(count * HASH_BYTES)
        known = np.frombuffer(self._file.read(), dtype=f"S{HASH_BYTES}")
        # Sorted parts, each more than twice as long as the next.
        self._parts: list[Hashes] = [np.sort(known)] if count else []

    def add(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Add hashes; says of each whether it is new, the first of equal ones counting as new."""
        fresh, first = np.unique(hashes, return_index=True)
        for part in self._parts:
            place = np.minimum(np.searchsorted(part, fresh), len(part) - 1)
            new = part[place] != fresh
            fresh, first = fresh[new], first[new]
        mask = np.zeros(len(hashes), dtype=bool)
        mask[first] = True
        if len(fresh):
            self._file.write(fresh.tobytes())
            self.count += len(fresh)
            self._parts.append(fresh)
            while len(self._parts) > 1 and len(self._parts[-2]) <= 2 * len(self._parts[-1]):
                last = self._parts.pop()
                self._parts[-1] = np.sort(np.concatenate([self._parts[-1], last]), kind="stable")
        return mask

    def save(self) -> int:
        """Bring the file to disk; returns the number of hashes in it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
