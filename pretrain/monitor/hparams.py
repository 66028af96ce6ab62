"""What TensorBoard's tab HPARAMS compares: the settings of several runs beside what came of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pretrain.config import Config

FIRST = ("model.residual.scheme", "optimizer.lr", "train.seed")
"""Shown before others, as is what the command line said."""

CURVES = ("validation/loss", "train/loss", "throughput/tokens_per_second")
SECTIONS = ("model", "train", "optimizer", "parallel", "zero")


def compared_settings(config: Config) -> dict[str, bool | int | float | str]:
    """Section.key -> value of what decides a run's result or speed; the scheme's defaults must be filled in.

    Left out are paths, and settings that are not set. All runs have the same keys but for those.
    """
    tree = config.model_dump(mode="json")
    return {
        name: value if isinstance(value, bool | int | float) else str(value)
        for section in SECTIONS
        for name, value in _leaves(section, tree[section])
        if value is not None and name != "train.init_from"
    }


def shown_first(overrides: Sequence[str]) -> list[str]:
    """Settings to compare by, given the command line's ``section.key=value``, in which a sweep says what it varies."""
    return [*FIRST, *(text.partition("=")[0] for text in overrides)]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}", below)
    else:
        yield name, value
