"""Random access to the samples of one split."""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import Manifest, Shard
from pretrain.data.shard_index import index_path, load_index
from pretrain.errors import UserError

# Well under the usual limit of 1024 open files of a process; large data sets have thousands of shards.
MAX_OPEN_SHARDS = 256


class ShardReader:
    """Reads samples by their number, with one pread each; keeps files open, and no state that affects what is read."""

    def __init__(self, manifest: Manifest, split: str, sequence_length: int) -> None:
        """Prepare reading; no shard is opened before its first sample is asked for.

        Args:
            manifest: the data set.
            split: ``train`` or ``validation``.
            sequence_length: length to train with. Where it is the shards' length divided by k, each stored sample gives
                k samples, the next beginning with the last token of the one before, as stored samples do.

        Raises:
            UserError: no such split, or a length that does not divide the shards'.
        """
        if sequence_length < 1 or manifest.sequence_length % sequence_length:
            raise UserError(
                f"sequence length {sequence_length} does not divide the {manifest.sequence_length} of the shards in "
                f"{manifest.directory}: choose a divisor, or build shards with --sequence-length {sequence_length}"
            )
        self.manifest = manifest
        self.sequence_length = sequence_length
        self._parts = manifest.sequence_length // sequence_length
        self._shards = manifest.split(split).shards
        self._stored_ends = np.cumsum([shard.samples for shard in self._shards], dtype=np.int64)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def __len__(self) -> int:
        """Samples of the split at this sequence length."""
        return int(self._stored_ends[-1]) * self._parts

    @property
    def shard_sizes(self) -> list[int]:
        """Samples per shard at this sequence length, in the order of the sample ids."""
        return [shard.samples * self._parts for shard in self._shards]

    def read(self, sample_id: int) -> npt.NDArray[np.int64]:
        """One sample: int64 ``[sequence_length + 1]``.

        Raises:
            IndexError: no such sample.
            UserError: the shard is missing, or is not the one that the manifest describes.
        """
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample {sample_id} of {len(self)}")
        stored, part = divmod(sample_id, self._parts)
        number = int(np.searchsorted(self._stored_ends, stored, side="right"))
        row = stored - (int(self._stored_ends[number]) - self._shards[number].samples)
        return self._shard(number).read(row, part * self.sequence_length, self.sequence_length + 1)

    def _shard(self, number: int) -> "_OpenShard":
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = _OpenShard(self.manifest, self._shards[number])
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return shard


class _OpenShard:
    """One tar, open for positional reads; closed when the last reference to it goes."""

    def __init__(self, manifest: Manifest, shard: Shard) -> None:
        self._path = manifest.directory / shard.file
        self._dtype = np.dtype(manifest.dtype)
        self._row_tokens = manifest.sequence_length + 1
        self._row_ends, self._row_offsets = self._lay_out(self._path, shard)
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"shard {self._path} cannot be opened: {error.strerror}") from error
        size = os.fstat(self._descriptor).st_size
        if size != shard.bytes:
            raise UserError(
                f"shard {self._path} has {size} bytes, its manifest says {shard.bytes}: "
                "restore the file or build the shards anew"
            )

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def _lay_out(self, path: Path, shard: Shard) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Per member: the number of rows up to its end, and the byte where row 0 would lie if the member held it."""
        index = load_index(index_path(path), shard.index_sha256)
        ends = np.cumsum(index.rows.astype(np.int64))
        first_rows = ends - index.rows.astype(np.int64)
        return ends, index.offsets.astype(np.int64) - first_rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self._row_tokens * self._dtype.itemsize

    def read(self, row: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens [first, first + count) of a stored sample, int64."""
        member = int(np.searchsorted(self._row_ends, row, side="right"))
        place = int(self._row_offsets[member]) + row * self._row_bytes + first * self._dtype.itemsize
        content = os.pread(self._descriptor, count * self._dtype.itemsize, place)
        if len(content) != count * self._dtype.itemsize:
            raise UserError(
                f"shard {self._path} ended early while it was read: restore the file or build the shards anew"
            )
        return np.frombuffer(content, dtype=self._dtype).astype(np.int64)
