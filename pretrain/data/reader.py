"""Random access to the samples of one split, each checked against its crc32.

A sample that cannot be read, or is not what was written, is read once more; then it is bad: the caller gets a row of
end-of-document tokens in its place and is told so. A whole shard that cannot be opened is so many bad samples. Nothing
here raises for damage, since an exception on one rank would leave the others waiting. A remote shard that cannot be had
is no damage: a source that is away comes back, and its samples are sound.
"""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from pretrain.data.manifest import Manifest, Shard
from pretrain.data.shard_index import check_header, entries, load_index
from pretrain.errors import UserError

# Each takes a descriptor for the tar and one for its mapped index: together under the usual limit of 1024 open files.
MAX_OPEN_SHARDS = 256


class _DamageError(Exception):
    """A shard that is not what the manifest describes."""


@dataclass(frozen=True)
class Rows:
    """Samples as they were read.

    Attributes:
        tokens: int64 ``[n, sequence_length + 1]``; a bad sample's are all the end-of-document token.
        sound: bool ``[n]``, False where the sample is bad.
    """

    tokens: npt.NDArray[np.int64]
    sound: npt.NDArray[np.bool_]


class ShardReader:
    """Reads samples by their number, with one pread each; keeps files open, and no state that affects what is read."""

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        sequence_length: int,
        report: Callable[[str], None] = print,
        max_open: int | None = None,
    ) -> None:
        """Prepare reading; no shard is opened before its first sample is asked for.

        Args:
            manifest: the data set.
            split: ``train`` or ``validation``.
            sequence_length: length to train with. Where it is the shards' length divided by k, each stored sample gives
                k samples, the next beginning with the last token of the one before, as stored samples do.
            report: is given one line for every bad sample and every shard that cannot be opened, once.
            max_open: shards to keep open; None for ``MAX_OPEN_SHARDS``.

        Raises:
            UserError: no such split, or a length that does not divide the shards'.
        """
        if sequence_length < 1 or manifest.sequence_length % sequence_length:
            raise UserError(
                f"sequence length {sequence_length} does not divide the {manifest.sequence_length} of the shards in "
                f"{manifest.folder.where}: choose a divisor, or build shards with --sequence-length {sequence_length}"
            )
        self.manifest = manifest
        self.sequence_length = sequence_length
        self._parts = manifest.sequence_length // sequence_length
        self._row_tokens = manifest.sequence_length + 1
        self._shards = manifest.split(split).shards
        self._stored_ends = np.cumsum([shard.samples for shard in self._shards], dtype=np.int64)
        self._stored_starts = self._stored_ends - [shard.samples for shard in self._shards]
        self._samples = int(self._stored_ends[-1]) * self._parts
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._max_open = max_open or MAX_OPEN_SHARDS
        self._report = report
        self._reported: set[str] = set()
        self._renewed: set[int] = set()

    def __len__(self) -> int:
        """Samples of the split at this sequence length."""
        return self._samples

    @property
    def shard_sizes(self) -> list[int]:
        """Samples per shard at this sequence length, in the order of the sample ids."""
        return [shard.samples * self._parts for shard in self._shards]

    def expect(self, shards: Sequence[int]) -> None:
        """Say which shards, by their place in the split, will be read soon, the first ones first."""
        self.manifest.folder.expect([entry for number in shards for entry in entries(self._shards[number])])

    def read(self, sample_id: int) -> npt.NDArray[np.int64]:
        """One sample: int64 ``[sequence_length + 1]``.

        Raises:
            IndexError: no such sample.
            UserError: it is bad; what is wrong with it was reported.
        """
        rows = self.read_rows(np.array([sample_id]))
        if not rows.sound[0]:
            raise UserError(f"sample {sample_id} of {self.manifest.folder.where} is damaged: restore its shard")
        sample: npt.NDArray[np.int64] = rows.tokens[0]
        return sample

    def read_rows(self, sample_ids: npt.NDArray[np.int64]) -> Rows:
        """Samples in the order of their ids ``[n]``.

        Raises:
            IndexError: no such sample.
            UserError: a remote shard cannot be had.
        """
        given = sample_ids.tolist()
        if given and not 0 <= min(given) <= max(given) < self._samples:
            raise IndexError(f"samples {min(given)} to {max(given)} of {self._samples}")
        stored = sample_ids if self._parts == 1 else sample_ids // self._parts
        numbers = np.searchsorted(self._stored_ends, stored, side="right")
        own = stored - self._stored_starts[numbers]
        content: npt.NDArray[np.unsignedinteger] = np.empty((len(stored), self._row_tokens), dtype=self.manifest.dtype)
        view = content.reshape(-1).view(np.uint8).data
        size = self._row_tokens * content.itemsize
        targets = (view[start : start + size] for start in range(0, len(view), size))
        sound = list(map(self._read_stored, numbers.tolist(), own.tolist(), targets))
        if self._parts == 1:
            tokens = content.astype(np.int64)
        else:
            columns = (sample_ids % self._parts)[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
            tokens = np.take_along_axis(content, columns, axis=1).astype(np.int64)
        if not all(sound):
            tokens[~np.array(sound)] = self.manifest.eod_id
        return Rows(tokens, np.array(sound, dtype=np.bool_))

    def _read_stored(self, number: int, row: int, target: memoryview) -> bool:
        """Fill ``target`` with a stored sample; whether it is what was written."""
        if self._fault_of(number, row, target) is None:
            return True
        if shard := self._open.pop(number, None):
            shard.forget(row)
        self._renew(number)
        fault = self._fault_of(number, row, target)
        if fault is not None and fault not in self._reported:
            self._reported.add(fault)
            self._report(fault)
        return fault is None

    def _fault_of(self, number: int, row: int, target: memoryview) -> str | None:
        """Fill ``target``; what is wrong with the sample or its shard, if anything."""
        try:
            return self._shard(number).read_into(target, row)
        except _DamageError as error:
            return str(error)

    def _renew(self, number: int) -> None:
        """Have the copy of a remote shard brought anew, once."""
        if number not in self._renewed:
            self._renewed.add(number)
            for entry in entries(self._shards[number]):
                self.manifest.folder.renew(entry)

    def _shard(self, number: int) -> "_OpenShard":
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = _OpenShard(self.manifest, self._shards[number])
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return shard


class _OpenShard:
    """One tar, open for positional reads; closed when the last reference to it goes."""

    def __init__(self, manifest: Manifest, shard: Shard) -> None:
        """Open a tar and its index.

        Raises:
            _DamageError: either is missing or not the one that the manifest describes.
            UserError: either is remote and cannot be had.
        """
        tar, side = entries(shard)
        self._leases = (manifest.folder.hold(tar), manifest.folder.hold(side))
        self._path = manifest.folder.describe(shard.file)
        self._descriptor = _open(self._leases[0].path)
        size = os.fstat(self._descriptor).st_size
        if size != shard.bytes:
            raise _DamageError(f"shard {self._path} has {size} bytes, its manifest says {shard.bytes}")
        try:
            index = load_index(self._leases[1].path, shard.index_sha256)
        except UserError as error:
            raise _DamageError(str(error)) from error
        except OSError as error:
            place = manifest.folder.describe(side.name)
            raise _DamageError(f"shard index {place} cannot be read: {error.strerror}") from error
        contradiction = check_header(index.header, manifest, shard)
        if contradiction:
            raise _DamageError(f"shard {self._path}: {contradiction}")
        self._row_bytes = index.header.row_bytes
        rows = index.rows.astype(np.int64)
        row_ends = np.cumsum(rows)
        # Per member the byte where row 0 would lie if the member held it.
        row_offsets = index.offsets.astype(np.int64) - (row_ends - rows) * self._row_bytes
        # Single numbers are looked up, which an array does many times slower than a memoryview.
        self._crc32, self._row_ends, self._row_offsets = index.crc32.data, row_ends.data, row_offsets.data

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def read_into(self, target: memoryview, row: int) -> str | None:
        """Fill ``target`` with the stored bytes of a sample; what is wrong with them, if anything."""
        place = self._place(row)
        try:
            count = os.preadv(self._descriptor, [target], place)
        except OSError as error:
            return f"sample {row} of shard {self._path} at byte {place} cannot be read: {error.strerror}"
        if count != len(target):
            return f"sample {row} of shard {self._path} at byte {place} has {count} bytes instead of {len(target)}"
        found, expected = zlib_ng.crc32(target), self._crc32[row]
        if found != expected:
            return (
                f"sample {row} of shard {self._path} at byte {place} has crc32 {found:08x}, its index says "
                f"{expected:08x}"
            )
        return None

    def forget(self, row: int) -> None:
        """Have the system read a sample from the disk or the server the next time, not from its memory."""
        os.posix_fadvise(self._descriptor, self._place(row), self._row_bytes, os.POSIX_FADV_DONTNEED)

    def _place(self, row: int) -> int:
        place: int = self._row_offsets[bisect_right(self._row_ends, row)] + row * self._row_bytes
        return place


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _DamageError(f"shard {path} cannot be opened: {error.strerror}") from error
