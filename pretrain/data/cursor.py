"""Where a data-parallel rank is in a stream of raw text: the little that a checkpoint keeps of each."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Cursor:
    """The first token of a rank's next sample, and what was counted on the way to its document.

    Attributes:
        epoch: of this rank.
        shard: how many of its shards of the epoch lie behind it.
        document: how many documents of the shard do, as they arrive.
        token: how many tokens of the document do.
        crc32: of the shard's documents up to this one, it included; -1 before the first one of a shard.
        read: documents that arrived so far.
        dropped: samples so far, over all epochs, that held no usable text.
        lost: documents so far, over all epochs, that damage cost.
    """

    epoch: int = 0
    shard: int = 0
    document: int = 0
    token: int = 0
    crc32: int = -1
    read: int = 0
    dropped: int = 0
    lost: int = 0

    def numbers(self) -> tuple[int, ...]:
        """All of it, in the order of the attributes; ``Cursor(*numbers)`` is equal."""
        return astuple(self)
