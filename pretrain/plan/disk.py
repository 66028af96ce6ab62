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
    """How many stay, by the retention settings where there are any."""
    settings = config.checkpoint.model_dump()
    last, forever, best = settings.get("keep_last"), settings.get("keep_every") or 0, settings.get("keep_best")
    if last is None:
        return saved
    # A new one is whole before an old one goes.
    return min(saved, int(last) + 1 + (config.train.steps // int(forever) if forever else 0) + bool(best))
