"""Disk that a run's checkpoints take."""

from dataclasses import dataclass

from pretrain.config import Config

BYTES_PER_PARAMETER = 12
"""fp32 masters and both moments of AdamW; the working weights are made from the masters."""


@dataclass(frozen=True)
class Disk:
    """Checkpoints of a run.

    Attributes:
        each: bytes of one.
        saved: over the whole run.
        kept: at once at the most, one that is being written included.
    """

    each: int
    saved: int
    kept: int

    @property
    def total(self) -> int:
        """Bytes at the most."""
        return self.each * self.kept


def checkpoint_disk(config: Config, parameters: int) -> Disk:
    """Disk for checkpoints of `parameters` parameters."""
    steps = config.train.steps
    every = config.checkpoint.every
    saved = -(-steps // every) if every else 1
    return Disk(BYTES_PER_PARAMETER * parameters, saved, _kept(config, saved))


def _kept(config: Config, saved: int) -> int:
    """How many stay, by the retention settings."""
    settings = config.checkpoint
    if settings.keep_last is None:
        return saved
    forever = config.train.steps // settings.keep_every if settings.keep_every else 0
    # A new one is whole before an old one goes.
    return min(saved, settings.keep_last + 1 + forever + settings.keep_best)
