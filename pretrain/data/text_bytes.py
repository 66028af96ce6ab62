"""How many bytes of text a token stands for, so that losses of different tokenizers can be compared per byte."""

import math

import numpy as np
import numpy.typing as npt

from pretrain.data.tokenizer import SPACE_MARK, Tokenizer


class TextBytes:
    """Bytes of UTF-8 that tokens decode to, counted token by token.

    So the bytes of samples add up, wherever a sample is cut: through a character of several byte pieces too. A control
    symbol stands for none. Neither does an unknown piece, as what it stood for is lost: bits per byte then come out too
    high, never too low.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        processor = tokenizer.processor
        self._eod_id = tokenizer.eod_id
        self._inside = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self._first = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for token in range(tokenizer.vocab_size):
            if processor.is_control(token) or processor.is_unknown(token):
                continue
            if processor.is_byte(token):
                self._inside[token] = self._first[token] = 1
                continue
            self._inside[token] = len(processor.id_to_piece(token).replace(SPACE_MARK, " ").encode())
            # A model that puts a space in front of every text drops it from what it decodes.
            self._first[token] = len(processor.decode([token]).encode())

    def count(self, tokens: npt.NDArray[np.integer], labels: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Bytes of each label, int64, of the shape of both.

        Args:
            tokens: the token in front of each label.
            labels: tokens that are predicted.
        """
        counted: npt.NDArray[np.int64] = np.where(tokens == self._eod_id, self._first[labels], self._inside[labels])
        return counted


def bits_per_nat(tokens: int, text_bytes: int) -> float | None:
    """What a loss in nats per token is to be multiplied by to be bits per byte; None where there is no text.

    loss * tokens nats are loss * tokens / ln 2 bits, of ``text_bytes`` bytes.
    """
    return tokens / (text_bytes * math.log(2)) if text_bytes else None
