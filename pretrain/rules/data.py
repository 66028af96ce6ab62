"""Rules about the data; see :mod:`pretrain.rules`, which checks them."""

from collections.abc import Sequence

from pretrain.config import Config
from pretrain.datasets import Dataset


def data_are_named_once(config: Config) -> str | None:
    """The data come from one data set or from a list."""
    if config.data.mode == "stream":
        return None
    one, several = config.data.manifest, config.data.datasets
    if one is None and not several:
        return "data.manifest is missing; give it, or several data sets as data.datasets"
    if one is not None and several:
        return f"data.manifest={one} and data.datasets are both given; remove one (data.manifest=null)"
    return None


def sequence_fits_shards(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """The model's sequence is the shards' or a whole fraction of it."""
    sequence = config.model.sequence_length
    for manifest in (dataset.manifest for dataset in datasets):
        stored = manifest.sequence_length
        if sequence > stored:
            return (
                f"model.sequence_length={sequence} is longer than the shards' {stored} in {manifest.folder.where}; "
                f"lower it or build shards with --sequence-length {sequence}"
            )
        if stored % sequence:
            return (
                f"model.sequence_length={sequence} does not divide the shards' {stored} in {manifest.folder.where}; "
                f"use a divisor or build shards with --sequence-length {sequence}"
            )
    return None


def data_sets_have_names_of_their_own(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """Curves and messages tell data sets apart."""
    seen: set[str] = set()
    for dataset in datasets:
        if dataset.name in seen:
            return f"two of data.datasets are called {dataset.name}; give one of them another name in data.datasets"
        seen.add(dataset.name)
    return None


def data_sets_differ(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """A data set takes part once, so that none of its samples comes twice in an epoch."""
    first: dict[str, Dataset] = {}
    for dataset in datasets:
        other = first.setdefault(dataset.manifest.fingerprint, dataset)
        if other is not dataset:
            return (
                f"data.datasets: {other.name} and {dataset.name} are the same data set "
                f"{dataset.manifest.fingerprint[:12]}; remove one, and raise the other's weight"
            )
    return None


def tokenizers_are_the_same(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """A token means the same in every data set."""
    one, *others = datasets
    for other in others:
        if _tokens_of(other) != _tokens_of(one):
            return (
                f"data.datasets: {one.name} was built with the tokenizer {one.manifest.tokenizer_sha256[:12]}, "
                f"{other.name} with {other.manifest.tokenizer_sha256[:12]}; build both with the same"
            )
    return None


def _tokens_of(dataset: Dataset) -> tuple[str, int, int]:
    manifest = dataset.manifest
    return manifest.tokenizer_sha256, manifest.vocab_size, manifest.eod_id


def vocabulary_fits_tokenizer(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """The embedding has a row for every piece of the tokenizer."""
    vocab, manifest = config.model.vocab_size, datasets[0].manifest
    if vocab is not None and vocab < manifest.vocab_size:
        return (
            f"model.vocab_size={vocab} is smaller than the tokenizer's {manifest.vocab_size} in "
            f"{manifest.folder.where}; raise it or leave it out"
        )
    return None


def validation_has_samples(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """A run that validates has held-out samples."""
    if config.validation.every and not any("validation" in dataset.manifest.splits for dataset in datasets):
        where = ", ".join(dataset.manifest.folder.where for dataset in datasets)
        return f"{where} has no validation split; set validation.every=0 or build shards with one"
    return None
