"""The same random tokens in the format of every contender of the benchmark `data`: row i is sample i in all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import NO_TOKENIZER
from tools.shard_writer import ShardLayout, SplitWriter
from tools.sharding.description import PackedData, PackedSplit, write_manifest
from tools.sharding.megatron import GivenVocabulary

# Many documents long, so that no writer sees a row that it could keep to itself.
_CHUNK_ROWS = 512

VOCABULARY = GivenVocabulary(vocab_size=1 << 16, eod_id=0)


@dataclass(frozen=True)
class Rows:
    """Samples that every format stores: uint16, each beginning with the last token of the one before.

    Attributes:
        count: of samples.
        sequence_length: L; a sample has L + 1 tokens.
        rows_per_shard: of the formats that have shards.
        seed: of the generator.
    """

    count: int
    sequence_length: int = 4096
    rows_per_shard: int = 4096
    seed: int = 0

    def chunks(self) -> Iterator[npt.NDArray[np.uint16]]:
        """All rows, uint16 ``[some, sequence_length + 1]`` at a time."""
        generator = np.random.default_rng(self.seed)
        last = generator.integers(0, VOCABULARY.vocab_size, 1, dtype=np.uint16)
        for start in range(0, self.count, _CHUNK_ROWS):
            rows = min(_CHUNK_ROWS, self.count - start)
            fresh = generator.integers(0, VOCABULARY.vocab_size, rows * self.sequence_length, dtype=np.uint16)
            stream = np.concatenate([last, fresh])
            last = stream[-1:]
            windows = np.lib.stride_tricks.sliding_window_view(stream, self.sequence_length + 1)
            yield np.ascontiguousarray(windows[:: self.sequence_length])

    def shards(self) -> int:
        """How many shards they fill."""
        return -(-self.count // self.rows_per_shard)


def write_ours(folder: Path, rows: Rows) -> None:
    """Shards with side indices and a manifest."""
    folder.mkdir()
    samples_per_member = min(128, rows.rows_per_shard)
    layout = ShardLayout(
        name="bench",
        sequence_length=rows.sequence_length,
        samples_per_member=samples_per_member,
        members_per_shard=rows.rows_per_shard // samples_per_member,
    )
    writer = SplitWriter(folder, "train", layout, VOCABULARY)
    for number, chunk in enumerate(rows.chunks()):
        writer.add(chunk[:, 1:].ravel() if number else np.concatenate([chunk[0, :1], chunk[:, 1:].ravel()]), 0)
    writer.finish()
    split = PackedSplit(
        documents=0,
        samples=writer.samples,
        dropped_tokens=writer.dropped_tokens,
        token_counts=writer.token_counts,
        shards=tuple(writer.shards),
    )
    write_manifest(
        folder,
        PackedData(
            name=layout.name,
            sequence_length=rows.sequence_length,
            vocab_size=VOCABULARY.vocab_size,
            eod_id=VOCABULARY.eod_id,
            dtype=writer.dtype,
            tokenizer=None,
            tokenizer_sha256=NO_TOKENIZER,
            splits={"train": split},
            statistics=None,
        ),
    )


def write_megatron(folder: Path, rows: Rows) -> None:
    """``tokens.bin`` and ``tokens.idx``, a sequence for each row."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir()
    builder = IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=np.uint16)
    for chunk in rows.chunks():
        builder.add_document(torch.from_numpy(chunk.ravel()), [chunk.shape[1]] * len(chunk))
    builder.finalize(str(folder / "tokens.idx"))


def write_webdataset(folder: Path, rows: Rows) -> None:
    """Tars with one raw member ``KEY.bin`` for each row."""
    import webdataset

    folder.mkdir()
    pattern = str(folder / "tokens-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=rows.rows_per_shard, maxsize=float("inf"), verbose=0) as writer:
        number = 0
        for chunk in rows.chunks():
            for row in chunk:
                writer.write({"__key__": f"{number:09d}", "bin": row.tobytes()})
                number += 1


def write_mosaic(folder: Path, rows: Rows) -> None:
    """MDS shards with a column ``tokens`` of arrays of one known shape, which is their cheapest encoding.

    Raises:
        ImportError: MosaicML streaming is not installed.
    """
    from streaming import MDSWriter

    row_bytes = 2 * (rows.sequence_length + 1)
    columns = {"tokens": f"ndarray:uint16:{rows.sequence_length + 1}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=rows.rows_per_shard * (row_bytes + 8)) as writer:
        for chunk in rows.chunks():
            for row in chunk:
                writer.write({"tokens": row})


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "ours": write_ours,
    "megatron": write_megatron,
    "webdataset": write_webdataset,
    "mosaic": write_mosaic,
}
"""Format -> what writes it into a folder that is not there yet."""
