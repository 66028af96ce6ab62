"""The text that a tokenizer is trained on: a sample of bounded size that depends on the documents alone."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tools.documents import VALIDATION_FRACTION, Document, hash_fraction, is_validation

# sentencepiece leaves longer lines out of the training without a word.
MAX_LINE_BYTES = 4192

# The round trip is tried on documents up to so many bytes.
ROUND_TRIP_BYTES = 20_000_000


@dataclass
class Sample:
    """Documents to train on and documents held out.

    Each document has a number in [0, 1) from the hash of its text; those with the smallest numbers are taken as long as
    they fit. So the sample is spread evenly over the inputs, and their order and division into files do not matter.

    Attributes:
        limit: bytes of UTF-8 text to train on; a single document may exceed it.
        size: bytes of those chosen so far.
        held_out: documents for the round trip; those that tools.shards puts into its validation split by default, so
            that the vocabulary is not fitted to them either.
    """

    limit: int
    size: int = 0
    held_out: list[Document] = field(default_factory=list)
    _held_out_size: int = 0
    _bound: float = 1.0
    _seen: int = 0
    # (minus the document's number, minus its place in the inputs, its size, it): the first to go lies on top.
    _chosen: list[tuple[float, int, int, Document]] = field(default_factory=list)

    def add(self, documents: Iterable[Document]) -> None:
        """Choose among these documents and those before."""
        for document in documents:
            self._seen += 1
            if is_validation(document.text, VALIDATION_FRACTION):
                self._hold_out(document)
                continue
            number = hash_fraction(document.text, "sample")
            if number >= self._bound:
                continue
            size = len(document.text.encode("utf-8"))
            heapq.heappush(self._chosen, (-number, -self._seen, size, document))
            self.size += size
            while self.size > self.limit and len(self._chosen) > 1:
                number, _, size, _ = heapq.heappop(self._chosen)
                self.size -= size
                self._bound = -number

    def take_held_out(self) -> None:
        """Train on what is held out: little text, such as a single document, may all be."""
        for number, document in enumerate(self.held_out):
            size = len(document.text.encode("utf-8"))
            self.size += size
            self._chosen.append((0.0, -number, size, document))
        self.held_out = []

    def documents(self) -> list[Document]:
        """The chosen documents in the order of the inputs."""
        return [document for *_, document in sorted(self._chosen, key=lambda entry: -entry[1])]

    def lines(self) -> Iterator[str]:
        """The lines to train on."""
        for document in self.documents():
            yield from training_lines(document.text)

    def _hold_out(self, document: Document) -> None:
        size = len(document.text.encode("utf-8"))
        if not self.held_out or self._held_out_size + size <= ROUND_TRIP_BYTES:
            self._held_out_size += size
            self.held_out.append(document)


def training_lines(text: str) -> Iterator[str]:
    """The lines of a text that are not empty, the long ones in parts of at most ``MAX_LINE_BYTES`` bytes of UTF-8."""
    # A character has at most 4 bytes.
    step = MAX_LINE_BYTES // 4
    for line in text.split("\n"):
        if len(line.encode("utf-8")) <= MAX_LINE_BYTES:
            if line:
                yield line
        else:
            yield from (line[start : start + step] for start in range(0, len(line), step))
