"""Data as shards of tokens with manifests: any order and any number of ranks (``data.mode=shards``)."""

from pathlib import Path
from typing import Any

import torch

from pretrain.config import Config
from pretrain.data.batch import micro_batches
from pretrain.data.batches import Source, TrainingBatches, ValidationBatches
from pretrain.data.mixture import Mixture
from pretrain.data.order import SampleOrder
from pretrain.data.reader import MAX_OPEN_SHARDS, ShardReader
from pretrain.data.shard_index import check_files
from pretrain.data.text_bytes import TextBytes
from pretrain.data.tokenizer import Tokenizer
from pretrain.datasets import Dataset, access, facts_of, load_datasets, require_room
from pretrain.evaluate import HeldOut
from pretrain.feed import agree
from pretrain.loop import Callback
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.resume import go_on_with_data
from pretrain.rules import check_data
from pretrain.state import TrainState
from pretrain.together import Together, do_together


class ShardedData:
    """See :class:`pretrain.run_data.RunData`."""

    def __init__(self, config: Config) -> None:
        """Read the manifests; UserError when they break a rule or their files are not there."""
        self._access = access(config.data)
        self._datasets = load_datasets(config.data, self._access)
        check_data(config, self._datasets)
        require_room(self._datasets, config.data, config.model.sequence_length)
        for dataset in self._datasets:
            check_files(dataset.manifest)
        self.facts = facts_of(self._datasets)
        self._mixture: Mixture | None = None

    def go_on(
        self, config: Config, state: TrainState, checkpoint: Path | None, record: dict[str, Any], dp_size: int
    ) -> None:
        """Let the mixture begin, go on, or change."""
        self._mixture = go_on_with_data(config, self._datasets, state, checkpoint)

    def notice(self) -> str:
        """Nothing to tell."""
        return ""

    def together(self, config: Config, place: Place) -> Together | None:
        """Where some shards are remote."""
        if place.world_size == 1 or all(dataset.manifest.folder.is_local for dataset in self._datasets):
            return None
        return Together(60 * config.data.source_timeout_minutes)

    def batches(self, config: Config, state: TrainState, place: Place) -> TrainingBatches:
        """This rank's training data."""
        assert self._mixture is not None, "the data have not been told where to go on"
        sources = []
        for dataset in self._datasets:
            # What is open is kept in the cache: no more than a block needs.
            at_a_time = dataset.window(config.model.sequence_length).shards
            max_open = max(1, MAX_OPEN_SHARDS // len(self._datasets))
            if not dataset.manifest.folder.is_local:
                max_open = min(max_open, at_a_time)
            reader = _reader(config, dataset, "train", place, max_open)
            name = self._mixture.orders[dataset.manifest.fingerprint]
            sources.append(Source(reader, SampleOrder(reader.shard_sizes, config.train.seed, name)))
        train = config.train
        return TrainingBatches(
            sources, self._mixture, train.micro_batch, train.global_batch, dp_rank=place.dp_rank, dp_size=place.dp_size
        )

    def held_out(self, config: Config, place: Place, together: Together | None) -> list[HeldOut]:
        """This rank's micro batches of each data set's validation split."""
        found = []
        for dataset in self._datasets:
            if "validation" not in dataset.manifest.splits:
                continue
            reader = _reader(config, dataset, "validation", place)
            if len(reader) < config.validation.samples and place.global_rank == 0:
                print(
                    f"warning: validation.samples={config.validation.samples}, but data set {dataset.name} holds out "
                    f"{len(reader)} of {config.model.sequence_length} tokens: all of them are taken",
                    flush=True,
                )
            batches = ValidationBatches(
                reader, config.validation.samples, config.train.micro_batch, place.dp_rank, place.dp_size
            )
            rows = do_together(together, batches.read)
            cut = micro_batches(torch.from_numpy(rows.tokens), agree(rows, place), config.train.micro_batch)
            found.append(HeldOut(dataset.name, dataset.weight, cut, _text_bytes(dataset)))
        return found

    def callbacks(self, config: Config, board: Board, place: Place) -> list[Callback]:
        """None: the state is a count."""
        return []

    def tokenizer(self) -> Tokenizer | None:
        """The one that all data sets share; None for imported tokens of another kind."""
        manifest = self._datasets[0].manifest
        return Tokenizer(manifest.tokenizer_file, manifest.eod_id) if manifest.tokenizer_file else None

    def close(self) -> None:
        """Wait for no source."""
        self._access.close()


def _text_bytes(dataset: Dataset) -> TextBytes | None:
    file = dataset.manifest.tokenizer_file
    return TextBytes(Tokenizer(file, dataset.manifest.eod_id)) if file else None


def _reader(config: Config, dataset: Dataset, split: str, place: Place, max_open: int | None = None) -> ShardReader:
    """One of tensor-parallel ranks, which share a machine, tells of the damage that all of them find."""

    def report(fault: str) -> None:
        if place.tp_rank == 0:
            print(f"warning: masked, data set {dataset.name}: {fault}", flush=True)

    return ShardReader(dataset.manifest, split, config.model.sequence_length, report, max_open)
