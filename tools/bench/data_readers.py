"""The contenders of shuffled reading: each gives the same batches of int64 from its own format, in its own order."""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import load_manifest
from pretrain.data.order import SampleOrder, permutation
from pretrain.data.reader import ShardReader
from tools.bench.data_formats import Rows

Batch = npt.NDArray[np.int64]
Batches = Generator[Batch, None, None]
Sequences = Generator[npt.NDArray[np.uint16], None, None]

SHUFFLE_BUFFER = 1000
"""Samples that webdataset shuffles within."""


@dataclass(frozen=True)
class Contender:
    """A way to read.

    Attributes:
        form: its format, of :data:`tools.bench.data_formats.WRITERS`.
        batches: endless batches of int64 ``[batch, sequence_length + 1]``, over and over through all rows.
        threaded: part of its work is done in threads of its own.
    """

    form: str
    batches: Callable[[Path, Rows, int], Batches]
    threaded: bool = False


def ours(folder: Path, rows: Rows, batch: int) -> Batches:
    """Our order and reader; every sample is compared with its crc32."""
    reader = ShardReader(load_manifest(folder), "train", rows.sequence_length)
    order = SampleOrder(reader.shard_sizes, rows.seed)
    draw = 0
    while True:
        read = reader.read_rows(order.sample_ids(np.arange(draw, draw + batch)))
        if not read.sound.all():
            raise RuntimeError("a sample was not what had been written")
        yield read.tokens
        draw += batch


def megatron(folder: Path, rows: Rows, batch: int) -> Batches:
    """Megatron-core's IndexedDataset, mapped into memory, at the places of a permutation made before."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / "tokens"))
    places = permutation(rows.count, str(rows.seed)).tolist()

    def sequences() -> Sequences:
        while True:
            for place in places:
                yield dataset[place]

    return in_batches(sequences(), rows, batch)


def webdataset(folder: Path, rows: Rows, batch: int) -> Batches:
    """webdataset's own reader: shards in random order, then a shuffle buffer; a member's bytes are the row."""
    import webdataset as wds

    shards = sorted(str(path) for path in folder.glob("*.tar"))
    pipeline = wds.WebDataset(shards, shardshuffle=len(shards), seed=rows.seed, empty_check=False)
    pipeline = pipeline.shuffle(SHUFFLE_BUFFER).repeat()
    return in_batches((np.frombuffer(sample["bin"], dtype=np.uint16) for sample in pipeline), rows, batch)


def mosaic(folder: Path, rows: Rows, batch: int) -> Batches:
    """MosaicML's StreamingDataset over a local folder, shuffled by its default algorithm."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=rows.seed, batch_size=batch)

    def sequences() -> Sequences:
        try:
            while True:
                for sample in dataset:
                    yield sample["tokens"]
        finally:
            dataset._iterator.exit()  # else its threads look for files that are gone

    return in_batches(sequences(), rows, batch)


def mosaic_local(folder: Path, rows: Rows, batch: int) -> Batches:
    """MosaicML's LocalDataset, which has no order of its own, at the places of a permutation made before."""
    from streaming import LocalDataset

    dataset = LocalDataset(str(folder))
    places = permutation(rows.count, str(rows.seed)).tolist()

    def sequences() -> Sequences:
        while True:
            for place in places:
                yield dataset[place]["tokens"]

    return in_batches(sequences(), rows, batch)


def in_batches(sequences: Sequences, rows: Rows, batch: int) -> Batches:
    """Gather rows in the stored type and widen a batch at a time, as our reader does."""
    content = np.empty((batch, rows.sequence_length + 1), dtype=np.uint16)
    with contextlib.closing(sequences):
        while True:
            for slot in range(batch):
                content[slot] = next(sequences)
            yield content.astype(np.int64)


CONTENDERS: dict[str, Contender] = {
    "ours": Contender("ours", ours),
    "Megatron IndexedDataset": Contender("megatron", megatron),
    "webdataset": Contender("webdataset", webdataset),
    "MosaicML StreamingDataset": Contender("mosaic", mosaic, threaded=True),
    "MosaicML LocalDataset": Contender("mosaic", mosaic_local),
}
