"""Raw text as one data-parallel rank's endless sequence of tokens, packed into samples; it goes on from a few numbers.

Every epoch has an order of the shards by (seed, epoch), which is dealt to the ranks like cards. A rank reads its shards
one after the other, and then those that it has of the next epoch, whatever the others do: no rank ever has fewer
samples than another.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from pretrain.data.cursor import Cursor
from pretrain.data.order import permutation
from pretrain.data.raw_text import arrivals, losses
from pretrain.data.shard_bytes import ShardBytes
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError


@dataclass(frozen=True)
class _Document:
    """Tokens, with the end of the document, and the cursor of the first one."""

    cursor: Cursor
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class TextShards:
    """Where raw text lies and how it becomes tokens.

    Attributes:
        places: of the shards.
        open: opens one of them.
        tokenizer: encodes documents.
        text_field: of a .json member.
        report: is given one line for every shard that is damaged, and for the first documents that are dropped.
    """

    places: Sequence[str]
    open: Callable[[str], ShardBytes]
    tokenizer: Tokenizer
    text_field: str
    report: Callable[[str], None]

    def order(self, seed: int, epoch: int, dp_rank: int, dp_size: int) -> list[str]:
        """The shards that a rank reads in an epoch, in order."""
        dealt = permutation(len(self.places), f"stream/{seed}/{epoch}")[dp_rank::dp_size]
        return [self.places[number] for number in dealt.tolist()]


class TextReader:
    """Reads shards one after the other; reports each kind of trouble once for each shard.

    Attributes:
        given: documents that it gave.
    """

    def __init__(self, shards: TextShards) -> None:
        self.given = 0
        self._shards = shards
        self._reported: set[tuple[str, str]] = set()

    def documents(self, places: Sequence[str], at: Cursor) -> Generator[_Document, None, Cursor]:
        """The documents of these shards, from the one at the cursor on; returns the cursor behind the last shard.

        Raises:
            UserError: a shard cannot be read, holds no text at all, or is another than at the cursor.
        """
        while at.shard < len(places):
            at = yield from self._of_shard(places[at.shard], at)
        return at

    def _of_shard(self, place: str, at: Cursor) -> Generator[_Document, None, Cursor]:
        crc32, number, usable = 0, 0, 0
        read, dropped = at.read, at.dropped
        resumed = at.crc32 >= 0
        with self._shards.open(place) as shard:
            for number, arrival in enumerate(arrivals(shard, self._shards.text_field), start=1):
                crc32 = zlib_ng.crc32(arrival.content, crc32)
                if number <= at.document:
                    usable += arrival.text is not None
                    continue
                if resumed and number == at.document + 1 and crc32 != at.crc32:
                    raise self._changed(shard)
                if arrival.text is None:
                    self._tell(place, f"{arrival.fault}: {shard.where}, {arrival.name}", arrival.fault)
                    dropped += 1
                else:
                    usable += 1
                    (tokens,) = self._shards.tokenizer.encode_documents([arrival.text])
                    here = replace(at, document=number - 1, token=0, crc32=crc32, read=read, dropped=dropped)
                    self.given += 1
                    yield _Document(here, tokens)
                read += 1
            if resumed and number <= at.document:
                raise self._changed(shard)
        missed = losses(shard.census, shard.where, number)
        if missed.line:
            self._tell(place, missed.line, "damage")
        elif not usable:
            raise self._unusable(shard, number)
        at = replace(at, shard=at.shard + 1, document=0, token=0, crc32=-1)
        return replace(at, read=read, dropped=dropped + missed.passed_over, lost=at.lost + missed.lost)

    def _tell(self, place: str, line: str, kind: str) -> None:
        if (place, kind) not in self._reported:
            self._reported.add((place, kind))
            self._shards.report(line)

    def _unusable(self, shard: ShardBytes, arrived: int) -> UserError:
        what = f"none of its {arrived} documents has text" if arrived else "it has no member .txt or .json"
        return UserError(
            f"shard {shard.where}: {what}; it must hold texts as members .txt, or .json with the field "
            f"data.text_field={self._shards.text_field}"
        )

    def _changed(self, shard: ShardBytes) -> UserError:
        return UserError(
            f"shard {shard.where} is not what the checkpoint was trained on; restore it or choose another run.dir"
        )


def endless(shards: TextShards, seed: int, dp_rank: int, dp_size: int, at: Cursor) -> Iterator[_Document]:
    """One rank's documents, epoch after epoch.

    Raises:
        UserError: as :meth:`TextReader.documents`; or a whole epoch of the rank's shards gives no document.
    """
    reader = TextReader(shards)
    while True:
        whole, given = at.shard == 0 and at.crc32 < 0, reader.given
        at = yield from reader.documents(shards.order(seed, at.epoch, dp_rank, dp_size), at)
        if whole and reader.given == given:
            raise UserError("data.urls: a whole epoch of shards gave no text; see the warnings above, and mend them")
        at = replace(at, epoch=at.epoch + 1, shard=0)


class Packer:
    """Cuts documents, one behind the other, into samples; a sample's last token is the next one's first."""

    def __init__(self, documents: Iterator[_Document], sequence_length: int, first_token: int = 0) -> None:
        """Begin at the token of that number in the first document."""
        self._documents = documents
        self._length = sequence_length
        self._waiting: deque[_Document] = deque()
        self._used = first_token  # of the first that waits
        self._available = -first_token

    def samples(self, count: int) -> npt.NDArray[np.int64]:
        """The next samples, int64 ``[n, sequence_length + 1]``; fewer than ``count`` when the documents end."""
        rows = np.empty((count, self._length + 1), dtype=np.int64)
        for number in range(count):
            while self._available <= self._length:
                document = next(self._documents, None)
                if document is None:
                    return rows[:number]
                self._waiting.append(document)
                self._available += len(document.tokens)
            self._fill(rows[number])
        return rows

    @property
    def cursor(self) -> Cursor:
        """The first token of the next sample; there is one once a sample was taken."""
        return replace(self._waiting[0].cursor, token=self._used)

    def _fill(self, row: npt.NDArray[np.int64]) -> None:
        filled, start = 0, self._used
        for document in self._waiting:
            part = document.tokens[start : start + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            start = 0
            if filled == len(row):
                break
        self._used += self._length
        self._available -= self._length
        while self._used >= len(self._waiting[0].tokens):
            self._used -= len(self._waiting.popleft().tokens)
