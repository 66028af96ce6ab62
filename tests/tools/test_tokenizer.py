import json
from pathlib import Path

import pytest

from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tests.pretrain.data.small import ODD_TEXTS, real_texts, write_documents
from tools.documents import VALIDATION_FRACTION, Document, is_validation
from tools.tokenizer import EOD_PIECE, main
from tools.tokenizer_sample import MAX_LINE_BYTES, Sample, training_lines


def train(documents: Path, out: Path, *more: str) -> Tokenizer:
    main(["train", "--input", str(documents), "--vocab-size", "500", "--out", str(out), *more])
    return Tokenizer(out)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_trained_model_loses_nothing(tmp_path: Path, model_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", real_texts(40))
    tokenizer = train(documents, tmp_path / "tokenizer.model", "--type", model_type, "--threads", "1")
    texts = [*real_texts(60), *ODD_TEXTS, EOD_PIECE, f"a{EOD_PIECE}b", "\x00\x01", "\n\n \n", "x" * 10_000]
    for text, tokens in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eod_id not in tokens[:-1].tolist()
    # No space is added in front of a text, which decoding alone would hide by taking it away again.
    whole, first, second = tokenizer.processor.encode(["word\n word", "word\n", " word"])
    assert whole == first + second
    assert tokenizer.processor.id_to_piece(tokenizer.eod_id) == EOD_PIECE
    assert tokenizer.processor.is_control(tokenizer.eod_id)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "40 records read: 40 documents"
    assert out[1].startswith("training on ")
    assert out[2] == f"{tokenizer.file}: {tokenizer.vocab_size} pieces (500 asked for), sha256 {tokenizer.sha256}"
    assert out[3].startswith("round trip: 0 failures in ")


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", real_texts(40))
    for model_type in ("bpe", "unigram"):
        first = train(documents, tmp_path / "first.model", "--type", model_type, "--threads", "2")
        second = train(documents, tmp_path / "second.model", "--type", model_type, "--threads", "2")
        assert first.sha256 == second.sha256


def test_the_real_size_is_told_when_text_gives_fewer_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train(write_documents(tmp_path / "few.jsonl", ["abc abc"]), tmp_path / "few.model")
    assert 259 < tokenizer.vocab_size < 300
    out = capsys.readouterr().out.splitlines()
    assert out[2].startswith(f"{tmp_path}/few.model: {tokenizer.vocab_size} pieces (500 asked for)")
    assert out[3].startswith("round trip: 0 failures in 1 training documents, ")


def test_a_document_that_does_not_come_back_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = next(text for text in (f"{number} \u2581" for number in range(1000)) if is_held_out(text))
    documents = write_documents(tmp_path / "documents.jsonl", [*real_texts(20), held_out])
    train(documents, tmp_path / "tokenizer.model")
    out = capsys.readouterr().out.splitlines()
    assert out[3] == f"round trip fails: {documents}:21 (it has U+2581, which decodes to a space)"
    assert out[4].startswith("round trip: 1 failures in ")


def is_held_out(text: str) -> bool:
    return is_validation(text, VALIDATION_FRACTION)


def test_long_lines_are_split_and_learned_from(tmp_path: Path) -> None:
    for text in ("ab" * 10_000, "ü" * 5000, "😀" * 3000, "x\n" + "y" * MAX_LINE_BYTES + "\n" + "z" * 4193):
        lines = list(training_lines(text))
        assert "".join(lines) == text.replace("\n", "")
        assert max(len(line.encode()) for line in lines) <= MAX_LINE_BYTES
    text = " ".join(["zyxwvut"] * 3000)
    assert not is_held_out(text)
    tokenizer = train(write_documents(tmp_path / "long.jsonl", [text]), tmp_path / "long.model")
    assert tokenizer.processor.piece_to_id("\u2581zyxwvut") != tokenizer.processor.unk_id()


def test_a_sample_is_spread_over_the_documents_and_spares_the_held_out() -> None:
    texts = [f"document {number:04d}" for number in range(5000)]
    sample = Sample(limit=1225 * 13)
    sample.add(Document(text, "") for text in texts)
    trained = [document.text for document in sample.documents()]
    held_out = [document.text for document in sample.held_out]
    assert held_out == [text for text in texts if is_held_out(text)]
    assert 50 < len(held_out) < 150
    assert not set(trained) & set(held_out)
    assert len(trained) == 1225
    assert sample.size == 1225 * 13
    assert trained == sorted(trained) == list(sample.lines())
    assert all(100 < sum(text in set(trained) for text in texts[k : k + 1000]) < 400 for k in range(0, 5000, 1000))


def test_a_single_document_is_trained_on_even_if_it_would_be_held_out(tmp_path: Path) -> None:
    text = next(
        text for number in range(10_000) if is_validation(text := f"{number} words of it\n" * 50, VALIDATION_FRACTION)
    )
    (tmp_path / "text.txt").write_text(text)
    main(["train", "--input", str(tmp_path / "text.txt"), "--vocab-size", "270", "--out", str(tmp_path / "t.model")])
    tokenizer = Tokenizer(tmp_path / "t.model")
    (tokens,) = tokenizer.encode_documents([text])
    assert tokenizer.decode(tokens) == text


def test_a_sample_does_not_depend_on_the_order_of_the_inputs() -> None:
    texts = ["x" * (number % 97) + str(number) for number in range(3000)]
    samples = []
    for order in (texts, texts[::-1], texts[1000:] + texts[:1000]):
        sample = Sample(limit=20_000)
        sample.add(Document(text, "") for text in order[:700])
        sample.add(Document(text, "") for text in order[700:])
        assert 19_900 < sample.size <= 20_000
        samples.append({document.text for document in sample.documents()})
    assert samples[0] == samples[1] == samples[2]


def test_text_that_spells_a_special_piece_does_not_become_one(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", [*real_texts(20), "<|user|> <|tool|>" * 50])
    tokenizer = train(documents, tmp_path / "t.model", "--special", "<|user|>", "<|tool|>")
    special = [tokenizer.processor.piece_to_id(piece) for piece in ("<|user|>", "<|tool|>", EOD_PIECE)]
    assert all(tokenizer.processor.is_control(piece) for piece in special)
    (tokens,) = tokenizer.encode_documents(["a <|user|><|tool|><|endoftext|>"])
    assert not set(special) & set(tokens[:-1].tolist())
    assert tokenizer.decode(tokens) == "a <|user|><|tool|><|endoftext|>"
    with pytest.raises(UserError) as error:
        train(documents, tmp_path / "other.model", "--special", EOD_PIECE)
    assert str(error.value) == "--special '<|endoftext|>' is a piece of every model already"


def test_all_inputs_give_the_same_model(tmp_path: Path) -> None:
    texts = real_texts(30)
    jsonl = write_documents(tmp_path / "documents.jsonl", texts)
    first = train(jsonl, tmp_path / "first.model")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    main(["train", "--input", str(folder), "--vocab-size", "500", "--out", str(tmp_path / "second.model")])
    assert Tokenizer(tmp_path / "second.model").sha256 == first.sha256


def test_inspect_shows_the_model_and_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train(write_documents(tmp_path / "d.jsonl", real_texts(20)), tmp_path / "t.model")
    capsys.readouterr()
    main(["inspect", str(tokenizer.file), "--text", "the\n<|endoftext|>"])
    out = capsys.readouterr().out.splitlines()
    assert out[:4] == [
        f"{tokenizer.file}: bpe, 500 pieces, sha256 {tokenizer.sha256}",
        f"end of document: id {tokenizer.eod_id}, '<|endoftext|>'",
        "control: 1 (1 '<|endoftext|>')",
        "byte: 256 (3 '<0x00>', 4 '<0x01>', 5 '<0x02>', 6 '<0x03>', ...)",
    ]
    tokens = tokenizer.processor.encode("the\n<|endoftext|>")
    shown = [line.split(maxsplit=1) for line in out[6:-1]]
    assert [(int(token), piece) for token, piece in shown] == [
        (token, repr(tokenizer.processor.id_to_piece(token))) for token in tokens
    ]
    assert out[-1] == f"{len(tokens)} tokens, 17 bytes, round trip the same"


def test_inspect_measures_the_bytes_of_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = real_texts(20)
    documents = write_documents(tmp_path / "d.jsonl", texts)
    tokenizer = train(documents, tmp_path / "t.model")
    capsys.readouterr()
    main(["inspect", str(tokenizer.file), "--input", str(documents)])
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(map(len, tokenizer.encode_documents(texts)))
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"round trip: 0 failures in 20 given documents, {size / tokens:.2f} bytes per token"
    )


@pytest.mark.parametrize(
    ("texts", "arguments", "message"),
    [
        (["some text, and more"], ["--vocab-size", "100"], "a vocabulary of 100 is too small for this text: raise "),
        ([], [], "no text to train on: give more documents"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, texts: list[str], arguments: list[str], message: str) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", texts)
    with pytest.raises(UserError) as error:
        train(documents, tmp_path / "t.model", *arguments)
    assert str(error.value).startswith(message)
    assert not (tmp_path / "t.model").exists()


def test_a_folder_in_the_place_of_the_model_is_refused_before_the_training(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", real_texts(3))
    with pytest.raises(UserError) as error:
        train(documents, tmp_path)
    assert str(error.value) == (
        f"output {tmp_path} is a folder: name the file of the model, such as {tmp_path}/tokenizer.model"
    )


def test_the_size_that_the_refusal_names_is_enough(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", real_texts(3))
    with pytest.raises(UserError) as error:
        train(documents, tmp_path / "t.model", "--vocab-size", "100")
    needed = str(error.value).removesuffix(" or more").rpartition(" ")[2]
    assert train(documents, tmp_path / "t.model", "--vocab-size", needed).vocab_size == int(needed)


def test_dropped_lines_are_listed_beside_the_model(tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"text": real_texts(1)[0]}) + "\nbroken\n")
    train(documents, tmp_path / "t.model")
    assert (tmp_path / "t.dropped.txt").read_text() == f"{documents}:2: broken JSON\n"
