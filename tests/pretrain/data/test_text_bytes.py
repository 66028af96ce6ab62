import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from pretrain.data.manifest import Manifest
from pretrain.data.text_bytes import TextBytes, bits_per_nat
from pretrain.data.tokenizer import Tokenizer

TEXTS = ["a plain line\n", "  two spaces, tab\t", "déjà vu 中文 🌍", "\n\nlines\n", "<|endoftext|> spelled out"]


def stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Documents one after another behind an end of document."""
    return np.concatenate([[tokenizer.eod_id], *tokenizer.encode_documents(texts)])


def test_every_byte_of_the_text_is_counted_wherever_samples_are_cut(manifest: Manifest) -> None:
    assert manifest.tokenizer_file is not None
    tokenizer = Tokenizer(manifest.tokenizer_file)
    tokens = stream(tokenizer, TEXTS)
    counted = TextBytes(tokenizer).count(tokens[:-1], tokens[1:])
    assert counted.sum() == sum(len(text.encode()) for text in TEXTS)
    assert (counted[tokens[1:] == tokenizer.eod_id] == 0).all()
    # The globe is no piece of this vocabulary: four tokens of a byte each, which decode to other things one by one.
    globe = tokenizer.processor.encode("🌍")[-4:]
    assert TextBytes(tokenizer).count(np.zeros(4, dtype=int) + globe[0], np.array(globe)).tolist() == [1] * 4


def test_a_space_that_the_model_adds_is_no_byte_and_an_unknown_piece_none(tmp_path: Path) -> None:
    texts = ["some words here", "more words", "words, some more"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 20),
        model_prefix=str(tmp_path / "model"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = Tokenizer(tmp_path / "model.model")
    assert tokenizer.processor.encode("words", out_type=str)[0].startswith("▁")
    tokens = stream(tokenizer, texts)
    lengths = TextBytes(tokenizer).count(tokens[:-1], tokens[1:])
    assert lengths.sum() == sum(len(text) for text in texts)
    assert TextBytes(tokenizer).count(np.array([5]), np.array([tokenizer.processor.unk_id()])).tolist() == [0]


def test_bits_per_byte_of_a_uniform_guess_at_bytes() -> None:
    factor = bits_per_nat(tokens=10, text_bytes=10)
    assert factor is not None
    assert math.log(256) * factor == pytest.approx(8)
    assert bits_per_nat(10, 0) is None
