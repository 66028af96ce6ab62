"""The data sets of a run, as its settings name them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.config import DatasetSettings, DataSettings
from pretrain.data.folder import Access
from pretrain.data.manifest import Manifest, canonical_json, load_manifest
from pretrain.data.mixture import Share
from pretrain.data.order import BLOCK_SAMPLES
from pretrain.data.shard_index import entries
from pretrain.data.transfer import Patience
from pretrain.data.window import Window, window
from pretrain.errors import UserError


@dataclass(frozen=True)
class Dataset:
    """A data set of the run.

    Attributes:
        name: in curves and messages.
        manifest: what it holds.
        weight: its part of the samples is weight over the sum of weights.
        max_epochs: of the whole run, after which it leaves the mixture; None for no end.
    """

    name: str
    manifest: Manifest
    weight: float = 1.0
    max_epochs: int | None = None

    def samples(self, sequence_length: int) -> int:
        """Training samples of an epoch at this sequence length."""
        return self.manifest.split("train").samples * (self.manifest.sequence_length // sequence_length)

    def window(self, sequence_length: int) -> Window:
        """What a block of the order touches at most."""
        shards = self.manifest.split("train").shards
        parts = self.manifest.sequence_length // sequence_length
        sizes = [sum(entry.at_most for entry in entries(shard)) for shard in shards]
        return window([shard.samples * parts for shard in shards], sizes, BLOCK_SAMPLES)


@dataclass(frozen=True)
class Facts:
    """What the model and the checkpoints must know of the data, whatever mode they are read in.

    Attributes:
        vocab_size: pieces of the tokenizer.
        eod_id: the token that ends a document.
        tokenizer_sha256: of the tokenizer's file, hex.
        fingerprint: of all data, hex.
        fingerprints: of each data set by its name.
        token_counts: occurrences of each token ``[vocab_size]``; None where nobody has counted.
    """

    vocab_size: int
    eod_id: int
    tokenizer_sha256: str
    fingerprint: str
    fingerprints: dict[str, str]
    token_counts: list[int] | None


def facts_of(datasets: Sequence[Dataset]) -> Facts:
    """The facts of data sets that share a tokenizer."""
    first = datasets[0].manifest
    return Facts(
        vocab_size=first.vocab_size,
        eod_id=first.eod_id,
        tokenizer_sha256=first.tokenizer_sha256,
        fingerprint=fingerprint(datasets),
        fingerprints={dataset.name: dataset.manifest.fingerprint for dataset in datasets},
        token_counts=token_counts(datasets),
    )


def named(settings: DataSettings) -> list[DatasetSettings]:
    """The data sets that the settings name, also in their simple form."""
    if settings.manifest is not None:
        return [DatasetSettings(manifest=settings.manifest)]
    return list(settings.datasets)


def access(settings: DataSettings) -> Access:
    """How the settings have remote data sets reached."""
    return Access(settings.cache_dir, int(settings.cache_gb * 1e9), Patience(60 * settings.source_timeout_minutes))


def require_room(datasets: Sequence[Dataset], settings: DataSettings, sequence_length: int) -> None:
    """See that the cache holds what the run reads at a time; else it would fetch the same shards over and over.

    Raises:
        UserError: it does not.
    """
    remote = [dataset for dataset in datasets if not dataset.manifest.folder.is_local]
    needed = sum(dataset.window(sequence_length).cache_bytes for dataset in remote)
    if needed > settings.cache_gb * 1e9:
        raise UserError(
            f"data.cache_gb={settings.cache_gb:g} does not hold the shards that are read at a time "
            f"({needed / 1e9:.3g} GB); raise it to at least {needed * 1.05 / 1e9:.3g}"
        )


def load_datasets(settings: DataSettings, reached: Access | None = None) -> list[Dataset]:
    """Read the manifests of all data sets, by the settings' own access if none is given.

    Raises:
        UserError: one cannot be used.
    """
    reached = reached or access(settings)
    loaded = [(given, load_manifest(given.manifest, reached)) for given in named(settings)]
    return [
        Dataset(given.name or manifest.name, manifest, given.weight, given.max_epochs) for given, manifest in loaded
    ]


def fingerprint(datasets: Sequence[Dataset]) -> str:
    """One fingerprint for the bytes of all data sets, hex: that of a single one, or a hash over those of several."""
    single, *more = sorted(dataset.manifest.fingerprint for dataset in datasets)
    return hashlib.sha256(canonical_json([single, *more])).hexdigest() if more else single


def token_counts(datasets: Sequence[Dataset]) -> list[int]:
    """Occurrences of each token as the mixture shows them to the model ``[vocab_size]``."""
    if len(datasets) == 1:
        counts: list[int] = datasets[0].manifest.token_counts.tolist()
        return counts
    total = sum(int(dataset.manifest.token_counts.sum()) for dataset in datasets)
    weights = np.array([dataset.weight for dataset in datasets])
    parts = [dataset.manifest.token_counts / dataset.manifest.token_counts.sum() for dataset in datasets]
    mixed: list[int] = np.rint(total * (weights / weights.sum()) @ np.array(parts)).astype(np.int64).tolist()
    return mixed


def shares_of(datasets: Sequence[Dataset], sequence_length: int) -> list[Share]:
    """The mixture that the settings describe, as if it were the run's first."""
    return [
        Share(
            fingerprint=dataset.manifest.fingerprint,
            # A run's first data set, alone, has nothing to be told apart from; it keeps its orders when others join.
            order="" if len(datasets) == 1 else dataset.manifest.fingerprint,
            samples=dataset.samples(sequence_length),
            weight=dataset.weight,
            max_epochs=dataset.max_epochs,
            first=0,
        )
        for dataset in datasets
    ]
