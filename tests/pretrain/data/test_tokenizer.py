import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from pretrain.data import tokenizer as tokenizer_module
from pretrain.data.manifest import Manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.pretrain.data.small import ODD_TEXTS, real_texts


def test_documents_end_with_one_end_of_document(manifest: Manifest) -> None:
    tokenizer = Tokenizer(manifest.tokenizer_file)
    texts = [*ODD_TEXTS, "<|endoftext|>", "x"]
    for text, tokens in zip(texts, tokenizer.encode_documents(texts, threads=2), strict=True):
        assert tokens.dtype == np.int32
        assert np.flatnonzero(tokens == tokenizer.eod_id).tolist() == [len(tokens) - 1]
        assert tokenizer.decode(tokens) == text


def test_long_documents_in_segments_keep_their_tokens(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(manifest.tokenizer_file)
    text = "\n".join([*real_texts(6), *ODD_TEXTS]) + "  " + "no_space_in_here" * 30 + "\n\n   end"
    whole = tokenizer.processor.encode(text)
    for length in (1, 2, 7, 50, 1000):
        monkeypatch.setattr(tokenizer_module, "SEGMENT_CHARACTERS", length)
        segments = tokenizer_module._segments(text)
        assert len(segments) > 10
        assert "".join(segments) == text
        assert tokenizer.encode_documents([text])[0][:-1].tolist() == whole


def foreign_model(path: Path, eod_id: int | None = None, **settings: object) -> Tokenizer:
    """A model trained by sentencepiece itself with other settings than ours."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(real_texts(6)).split("\n")),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        minloglevel=2,
        **settings,
    )
    path.write_bytes(model.getvalue())
    return Tokenizer(path, eod_id)


@pytest.mark.parametrize(
    "settings", [{}, {"treat_whitespace_as_suffix": True, "add_dummy_prefix": False}, {"split_by_whitespace": False}]
)
def test_models_whose_tokens_depend_on_the_whole_text_see_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    tokenizer = foreign_model(tmp_path / "foreign.model", **settings)
    monkeypatch.setattr(tokenizer_module, "SEGMENT_CHARACTERS", 10)
    text = real_texts(8)[7]
    assert tokenizer.encode_documents([text])[0][:-1].tolist() == tokenizer.processor.encode(text)


def test_unusable_models_are_refused(tmp_path: Path) -> None:
    absent, broken = tmp_path / "absent.model", tmp_path / "broken.model"
    with pytest.raises(UserError) as error:
        Tokenizer(absent)
    assert str(error.value) == f"tokenizer {absent} does not exist"
    for content in (b"", b"no model at all"):
        broken.write_bytes(content)
        with pytest.raises(UserError) as error:
            Tokenizer(broken)
        assert str(error.value) == f"tokenizer {broken} is no sentencepiece model"
    with pytest.raises(UserError) as error:
        foreign_model(tmp_path / "endless.model", eos_id=-1)
    assert str(error.value) == (
        f"tokenizer {tmp_path}/endless.model has no end-of-sentence symbol, which ends documents: "
        "name another control symbol by --eod-id"
    )


def test_another_control_symbol_can_end_documents_and_nothing_else(tmp_path: Path) -> None:
    model = tmp_path / "foreign.model"
    tokenizer = foreign_model(model, eod_id=1, bos_id=1, eos_id=-1)
    (tokens,) = tokenizer.encode_documents(["a b"])
    assert (tokenizer.eod_id, tokens[-1]) == (1, 1)
    for wrong in (0, 5, tokenizer.vocab_size):
        with pytest.raises(UserError) as error:
            Tokenizer(model, eod_id=wrong)
        assert str(error.value) == (
            f"tokenizer {model}: id {wrong} is no control symbol, so it cannot end documents "
            "(text may be encoded to it)"
        )
