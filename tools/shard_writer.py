"""From token streams to tar shards with their side indices: one split of a data set."""

import io
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.files import partial_path, publish, sha256_of_file
from pretrain.data.manifest import FORMAT_VERSION, Dtype, Shard
from pretrain.data.shard_index import IndexHeader, index_path, write_index
from pretrain.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """How samples are laid out in shards.

    Attributes:
        name: of the data set; shards are ``<name>-<split>-NNNNNN.tar``.
        sequence_length: L; a sample has L + 1 tokens and begins with the last token of the one before.
        samples_per_member: rows of one ``.npy`` file in a tar.
        members_per_shard: of these files in one tar.
    """

    name: str
    sequence_length: int
    samples_per_member: int
    members_per_shard: int


class SplitWriter:
    """Packs documents into samples without gaps and writes them out, a member at a time.

    Attributes:
        shards: those complete so far.
        documents: received.
        samples: written.
        dropped_tokens: the tail that filled no sample; known after :meth:`finish`.
        token_counts: int64 ``[vocab_size]`` over the labels, all tokens of the samples but their first.
    """

    def __init__(self, directory: Path, split: str, layout: ShardLayout, tokenizer: Tokenizer) -> None:
        self.shards: list[Shard] = []
        self.documents = 0
        self.samples = 0
        self.dropped_tokens = 0
        self.token_counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self.dtype: Dtype = dtype_of(tokenizer.vocab_size)
        self._directory = directory
        self._stem = f"{layout.name}-{split}"
        self._layout = layout
        self._tokenizer = tokenizer
        self._pending: list[npt.NDArray[np.int32]] = []
        self._pending_tokens = 0
        self._tar: _TarFile | None = None

    def add_document(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append the tokens of a document, its end-of-document token included."""
        self.documents += 1
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        while self._pending_tokens > self._layout.samples_per_member * self._layout.sequence_length:
            self._write_member(self._layout.samples_per_member)

    def finish(self) -> None:
        """Write what still fills samples, count the rest as dropped, and complete the last shard."""
        rows = max(0, self._pending_tokens - 1) // self._layout.sequence_length
        if rows:
            self._write_member(rows)
        # The first pending token is the last one of the last sample, if there is one.
        self.dropped_tokens = self._pending_tokens - min(1, self.samples)
        if self._tar is not None:
            self._complete_shard(self._tar)

    def discard(self) -> None:
        """Remove everything this writer has written."""
        if self._tar is not None:
            self._tar.close()
            partial_path(self._tar.path).unlink()
        for shard in self.shards:
            (self._directory / shard.file).unlink()
            index_path(self._directory / shard.file).unlink()

    @property
    def tokens(self) -> int:
        """Labels written."""
        return int(self.token_counts.sum())

    def _write_member(self, rows: int) -> None:
        length = self._layout.sequence_length
        stream = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        used = stream[: rows * length + 1]
        self.token_counts += np.bincount(used[1:], minlength=len(self.token_counts))
        if self._tar is None:
            self._tar = _TarFile(self._directory / f"{self._stem}-{len(self.shards):06d}.tar")
        block = np.lib.stride_tricks.sliding_window_view(used, length + 1)[::length]
        self._tar.write(np.ascontiguousarray(block, dtype=self.dtype))
        self.samples += rows
        self._pending = [stream[rows * length :]]
        self._pending_tokens = len(self._pending[0])
        if len(self._tar.rows) == self._layout.members_per_shard:
            self._complete_shard(self._tar)

    def _complete_shard(self, tar: "_TarFile") -> None:
        offsets = tar.complete()
        header = IndexHeader(
            version=FORMAT_VERSION,
            tar=tar.path.name,
            tar_bytes=tar.path.stat().st_size,
            tar_sha256=sha256_of_file(tar.path),
            tokenizer_sha256=self._tokenizer.sha256,
            eod_id=self._tokenizer.eod_id,
            dtype=self.dtype,
            sample_length=self._layout.sequence_length + 1,
            samples=sum(tar.rows),
            members=len(tar.rows),
        )
        self.shards.append(
            Shard(
                file=tar.path.name,
                samples=header.samples,
                bytes=header.tar_bytes,
                sha256=header.tar_sha256,
                index_sha256=write_index(index_path(tar.path), header, offsets, tar.rows, tar.crc32),
            )
        )
        self._tar = None


class _TarFile:
    """One tar while it is written; its bytes depend on its name and the samples alone.

    Attributes:
        path: where it will lie when it is complete.
        rows: samples of each member.
        crc32: of the bytes of each sample.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[int] = []
        self.crc32: list[int] = []
        self._file = partial_path(path).open("wb")
        # Here, not above: it imports torch, seconds that a refusal or a check of shards need not wait for.
        from webdataset import TarWriter

        self._tar = TarWriter(self._file, encoder=False, mtime=0, user="", group="")

    def write(self, block: npt.NDArray[np.unsignedinteger]) -> None:
        """Add a member with these samples, one a row."""
        content = io.BytesIO()
        np.lib.format.write_array(content, block, version=(1, 0), allow_pickle=False)
        key = f"{self.path.stem}-{len(self.rows):06d}"
        self._tar.write({"__key__": key, "tokens.npy": content.getvalue()})
        self.rows.append(len(block))
        self.crc32.extend(zlib.crc32(row) for row in block)
        self._row_bytes = block[0].nbytes

    def close(self) -> None:
        self._tar.close()
        self._file.close()

    def complete(self) -> list[int]:
        """Close the tar, give it its name, and say at which byte each member's first sample begins."""
        self.close()
        publish(self.path)
        with tarfile.open(self.path, "r:") as tar:
            return [
                entry.offset_data + entry.size - rows * self._row_bytes
                for entry, rows in zip(tar, self.rows, strict=True)
            ]


def dtype_of(vocab_size: int) -> Dtype:
    """The smallest stored type that holds every token of a vocabulary."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"
