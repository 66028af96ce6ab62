"""A sentencepiece model as the rest of the program uses it: text to tokens, fast for long documents, and back."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from pretrain.data.files import sha256_of_file
from pretrain.errors import UserError

# sentencepiece marks a space by this character, so text that holds it decodes to a space.
SPACE_MARK = "\u2581"

# BPE over one text costs more than linearly in its length: 16 kB at a time is about 3 times faster than 4 MB.
SEGMENT_CHARACTERS = 1 << 14

_INNER_SPACE = re.compile(f"[^{SPACE_MARK}\n][{SPACE_MARK}\n]")
_SEGMENT_END = re.compile(r"[^ \n](?=[ \n])")


class Tokenizer:
    """A loaded sentencepiece model.

    Attributes:
        file: path of the model.
        sha256: of that file, hex.
        vocab_size: pieces.
        eod_id: the control symbol that ends a document; no text is ever encoded to it.
        processor: the sentencepiece processor itself.
    """

    def __init__(self, file: Path | str, eod_id: int | None = None) -> None:
        """Load a model.

        Args:
            file: the model.
            eod_id: control symbol that ends documents; None takes the model's end-of-sentence symbol.

        Raises:
            UserError: the file is absent or no model, or there is no control symbol to end documents with.
        """
        self.file = Path(file)
        if not self.file.is_file():
            raise UserError(f"tokenizer {self.file} does not exist")
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(self.file.read_bytes())
        except RuntimeError as error:
            raise UserError(f"tokenizer {self.file} is no sentencepiece model") from error
        self.sha256 = sha256_of_file(self.file)
        self.vocab_size: int = self.processor.get_piece_size()
        self.eod_id: int = self.processor.eos_id() if eod_id is None else eod_id
        if self.eod_id < 0:
            raise UserError(
                f"tokenizer {self.file} has no end-of-sentence symbol, which ends documents: "
                "name another control symbol by --eod-id"
            )
        if self.eod_id >= self.vocab_size or not self.processor.is_control(self.eod_id):
            raise UserError(
                f"tokenizer {self.file}: id {self.eod_id} is no control symbol, so it cannot end documents "
                "(text may be encoded to it)"
            )
        self._separable = self._is_separable()

    def encode_documents(self, texts: Sequence[str], threads: int = 1) -> list[npt.NDArray[np.int32]]:
        """Tokens of each document with ``eod_id`` behind them, int32.

        A long document is encoded in segments that end before a space or a newline, if no piece of the vocabulary can
        reach across such a place; else it stays whole. With BPE this gives the ids of the whole text. With unigram it
        does so up to the rounding of sentencepiece's fp32 path scores, which flips near ties in texts of a megabyte.
        """
        segments: list[str] = []
        counts: list[int] = []
        for text in texts:
            parts = _segments(text) if self._separable else [text]
            segments.extend(parts)
            counts.append(len(parts))
        encoded = iter(self.processor.encode(segments, return_type="numpy", num_threads=threads))
        end = np.array([self.eod_id], dtype=np.int32)
        return [np.concatenate([*(next(encoded) for _ in range(count)), end]) for count in counts]

    def decode(self, tokens: npt.NDArray[np.integer]) -> str:
        """The text of tokens; control symbols give none."""
        text: str = self.processor.decode(tokens.tolist())
        return text

    def _is_separable(self) -> bool:
        """Whether text may be cut before a space or a newline without changing its tokens."""
        pieces = (self.processor.id_to_piece(token) for token in range(self.vocab_size))
        if any(_INNER_SPACE.search(piece) for piece in pieces):
            return False
        # A model that adds a space in front of each text, or drops it, shows it here.
        whole = self.processor.encode("a a\n  a\na")
        cut = self.processor.encode(["a", " a", "\n  a", "\na"])
        return bool(whole == [token for part in cut for token in part])


def _segments(text: str) -> list[str]:
    """Cut a text before the first space or newline that follows each ``SEGMENT_CHARACTERS``, at the end of a word."""
    cuts = [0]
    while len(text) - cuts[-1] > SEGMENT_CHARACTERS:
        end = _SEGMENT_END.search(text, cuts[-1] + SEGMENT_CHARACTERS)
        if end is None:
            break
        cuts.append(end.end())
    return [text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True)]
