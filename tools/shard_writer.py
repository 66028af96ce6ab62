"""From token streams to tar shards with their side indices: one split of a data set, resumable anywhere."""

import io
import os
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from pretrain.data.files import partial_path, publish, sha256_of_file
from pretrain.data.manifest import FORMAT_VERSION, Dtype, Shard
from pretrain.data.shard_index import IndexHeader, index_path, write_index
from pretrain.errors import UserError
from tools.sharding.arrays import from_text, to_text


class Vocabulary(Protocol):
    """What shards record of a tokenizer; a :class:`pretrain.data.tokenizer.Tokenizer` is one."""

    vocab_size: int
    eod_id: int
    sha256: str


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
        received_tokens: of these documents.
        samples: written.
        dropped_tokens: the tail that filled no sample; known after :meth:`finish`.
        token_counts: int64 ``[vocab_size]`` over the labels, all tokens of the samples but their first.
    """

    def __init__(self, directory: Path, split: str, layout: ShardLayout, vocabulary: Vocabulary) -> None:
        self.shards: list[Shard] = []
        self.documents = 0
        self.received_tokens = 0
        self.samples = 0
        self.dropped_tokens = 0
        self.token_counts = np.zeros(vocabulary.vocab_size, dtype=np.int64)
        self.dtype: Dtype = dtype_of(vocabulary.vocab_size)
        self._directory = directory
        self._stem = f"{layout.name}-{split}"
        self._layout = layout
        self._vocabulary = vocabulary
        self._pending: list[npt.NDArray[np.unsignedinteger]] = []
        self._pending_tokens = 0
        self._tar: _TarFile | None = None

    def add_document(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append the tokens of a document, its end-of-document token included."""
        self.add(tokens, 1)

    def add(self, tokens: npt.NDArray[np.integer], documents: int) -> None:
        """Append the tokens of so many documents, one behind the other, each with its end-of-document token."""
        self.documents += documents
        self.received_tokens += len(tokens)
        self._pending.append(tokens.astype(self.dtype))
        self._pending_tokens += len(tokens)
        if self._pending_tokens <= self._layout.samples_per_member * self._layout.sequence_length:
            return
        stream = np.concatenate(self._pending)
        used = 0
        while len(stream) - used > self._layout.samples_per_member * self._layout.sequence_length:
            used += self._write_member(stream[used:], self._layout.samples_per_member)
        self._keep(stream[used:])

    def finish(self) -> None:
        """Write what still fills samples, count the rest as dropped, and complete the last shard."""
        rows = max(0, self._pending_tokens - 1) // self._layout.sequence_length
        if rows:
            stream = np.concatenate(self._pending)
            self._keep(stream[self._write_member(stream, rows) :])
        # The first pending token is the last one of the last sample, if there is one.
        self.dropped_tokens = self._pending_tokens - min(1, self.samples)
        if self._tar is not None:
            self._complete_shard(self._tar)

    @property
    def tokens(self) -> int:
        """Labels written."""
        return int(self.token_counts.sum())

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` needs, as JSON values; what is written so far is on disk when this returns."""
        pending = np.concatenate(self._pending) if self._pending else np.zeros(0, dtype=self.dtype)
        return {
            "shards": [asdict(shard) for shard in self.shards],
            "documents": self.documents,
            "received_tokens": self.received_tokens,
            "samples": self.samples,
            "token_counts": to_text(self.token_counts),
            "pending": to_text(pending),
            "tar": self._tar.state() if self._tar is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state: what was written since is removed.

        Raises:
            UserError: a file that the state tells of is not there as it was.
        """
        self.shards = [Shard(**shard) for shard in state["shards"]]
        self.documents, self.samples = state["documents"], state["samples"]
        self.received_tokens = state["received_tokens"]
        self.token_counts = from_text(state["token_counts"])
        self._keep(from_text(state["pending"]))
        for shard in self.shards:
            _require_bytes(self._directory / shard.file, shard.bytes)
        current = self._path(len(self.shards))
        if state["tar"] is not None:
            if current.exists():
                # It was completed after the state was saved, and its beginning is what the state tells of.
                current.replace(partial_path(current))
            _require_bytes(partial_path(current), state["tar"]["bytes"], at_least=True)
            self._tar = _TarFile(current, state["tar"])
        kept = {self._directory / shard.file for shard in self.shards}
        for path in self._directory.glob(f"{self._stem}-{'[0-9]' * 6}.*"):
            if path not in {partial_path(current), *kept, *map(index_path, kept)} or (
                path == partial_path(current) and self._tar is None
            ):
                path.unlink()

    def close(self) -> None:
        """Close what is open, and leave everything as it is."""
        if self._tar is not None:
            self._tar.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:06d}.tar"

    def _keep(self, stream: npt.NDArray[np.unsignedinteger]) -> None:
        """Hold back what fills no member yet; a copy, so that the rest of its array can go."""
        self._pending, self._pending_tokens = [stream.copy()], len(stream)

    def _write_member(self, stream: npt.NDArray[np.unsignedinteger], rows: int) -> int:
        """Write the first ``rows`` samples of a stream; returns the tokens that no later sample needs."""
        length = self._layout.sequence_length
        used = stream[: rows * length + 1]
        self.token_counts += np.bincount(used[1:], minlength=len(self.token_counts))
        if self._tar is None:
            self._tar = _TarFile(self._path(len(self.shards)))
        block = np.lib.stride_tricks.sliding_window_view(used, length + 1)[::length]
        self._tar.write(np.ascontiguousarray(block, dtype=self.dtype))
        self.samples += rows
        if len(self._tar.rows) == self._layout.members_per_shard:
            self._complete_shard(self._tar)
        return rows * length

    def _complete_shard(self, tar: "_TarFile") -> None:
        tar.complete()
        header = IndexHeader(
            version=FORMAT_VERSION,
            tar=tar.path.name,
            tar_bytes=tar.path.stat().st_size,
            tar_sha256=sha256_of_file(tar.path),
            tokenizer_sha256=self._vocabulary.sha256,
            eod_id=self._vocabulary.eod_id,
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
                index_sha256=write_index(index_path(tar.path), header, tar.offsets, tar.rows, tar.crc32),
            )
        )
        self._tar = None


class _TarFile:
    """One tar while it is written; its bytes depend on its name and the samples alone.

    Attributes:
        path: where it will lie when it is complete.
        offsets: byte at which each member's first sample begins.
        rows: samples of each member.
        crc32: of the bytes of each sample.
    """

    def __init__(self, path: Path, state: dict[str, Any] | None = None) -> None:
        self.path = path
        self.offsets: list[int] = from_text(state["offsets"]).tolist() if state else []
        self.rows: list[int] = from_text(state["rows"]).tolist() if state else []
        self.crc32: list[int] = from_text(state["crc32"]).tolist() if state else []
        self._file = partial_path(path).open("r+b" if state else "wb")
        if state:
            self._file.truncate(state["bytes"])
            self._file.seek(state["bytes"])
        self._tar = tarfile.open(fileobj=self._file, mode="w:", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def write(self, block: npt.NDArray[np.unsignedinteger]) -> None:
        """Add a member with these samples, one a row."""
        content = io.BytesIO()
        np.lib.format.write_array(content, block, version=(1, 0), allow_pickle=False)
        entry = tarfile.TarInfo(f"{self.path.stem}-{len(self.rows):06d}.tokens.npy")
        entry.size = content.tell()
        entry.mode = 0o444
        content.seek(0)
        self._tar.addfile(entry, content)
        self._tar.members.clear()  # type: ignore[attr-defined]  # it would grow with every member
        padding = -entry.size % tarfile.BLOCKSIZE
        self.offsets.append(self._file.tell() - padding - block.nbytes)
        self.rows.append(len(block))
        self.crc32.extend(zlib_ng.crc32(row) for row in block)

    def state(self) -> dict[str, Any]:
        """What is needed to go on from here; the bytes so far are on disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {
            "bytes": self._file.tell(),
            "offsets": to_text(np.array(self.offsets, dtype="<u8")),
            "rows": to_text(np.array(self.rows, dtype="<u8")),
            "crc32": to_text(np.array(self.crc32, dtype="<u4")),
        }

    def close(self) -> None:
        """Close the file without completing the tar."""
        self._file.close()

    def complete(self) -> None:
        """Write the end of the tar, close it, and give it its name."""
        self._tar.close()
        self._file.close()
        publish(self.path)


def _require_bytes(path: Path, size: int, at_least: bool = False) -> None:
    found = path.stat().st_size if path.is_file() else -1
    if found != size and not (at_least and found > size):
        raise UserError(f"{path} is not as the interrupted build left it: start anew by --force")


def dtype_of(vocab_size: int) -> Dtype:
    """The smallest stored type that holds every token of a vocabulary."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"
