"""Train a lossless sentencepiece model, and look at one.

``python -m tools.tokenizer train --input F... --vocab-size N --out DIR/tokenizer.model`` and ``inspect MODEL``.
"""

import argparse
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from pretrain.data.files import write_atomically
from pretrain.data.tokenizer import SPACE_MARK, Tokenizer
from pretrain.errors import UserError, run_cli
from tools.arguments import natural_int, positive_int
from tools.documents import Document, default_threads, make_folder
from tools.inputs import (
    Account,
    Progress,
    Reading,
    add_input_arguments,
    find_inputs,
    read_documents,
    reading_of,
)
from tools.tokenizer_sample import MAX_LINE_BYTES, ROUND_TRIP_BYTES, Sample

EOD_PIECE = "<|endoftext|>"

# Text goes in as it is, unknown characters as bytes; white space counts and may form pieces. The end of a document is a
# control symbol, so text that spells it is encoded like any other text.
LOSSLESS: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "byte_fallback": True,
    "user_defined_symbols": ["\n"],
    "unk_id": 0,
    "eos_id": 1,
    "eos_piece": EOD_PIECE,
    "bos_id": -1,
    "pad_id": -1,
}

_SHOWN_FAILURES = 10


def train(
    inputs: Sequence[Path | str],
    vocab_size: int,
    out: Path,
    model_type: str,
    sample_bytes: int,
    threads: int,
    reading: Reading | None = None,
    strict: bool = False,
    special: Sequence[str] = (),
) -> None:
    """Train a model, write it, and check on held-out documents that it loses nothing.

    Args:
        inputs: files, folders and glob patterns.
        vocab_size: pieces wanted; the model may get fewer from little text, never more.
        out: file of the model.
        model_type: ``bpe`` or ``unigram``.
        sample_bytes: of text to train on at most, spread evenly over all; the memory needed is a few times that.
        threads: of the training and of the check.
        reading: how to read the inputs.
        strict: stop at the first bad input.
        special: control symbols beside the end of a document; like it, no text is ever encoded to them.

    Raises:
        UserError: an input is missing, ``out`` is a folder, there is no text, or it has more characters than the
            vocabulary has pieces.
    """
    files = find_inputs(inputs)
    if out.is_dir():
        raise UserError(f"output {out} is a folder: name the file of the model, such as {out / 'tokenizer.model'}")
    for piece in special:
        if piece in (EOD_PIECE, "\n", "<unk>"):
            raise UserError(f"--special {piece!r} is a piece of every model already")
    make_folder(out.parent)
    account = Account(strict=strict)
    sample = Sample(limit=sample_bytes)
    progress = Progress("reading", sum(file.size for file in files))
    sample.add(read_documents(files, reading or Reading(), account, progress))
    progress.end()
    account.report(out.with_suffix(".dropped.txt"))
    if not sample.documents():
        sample.take_held_out()
    trained = sample.documents()
    if not trained:
        raise UserError("no text to train on: give more documents")
    print(f"training on {len(trained)} documents, {sample.size / 1e6:.2f} MB, {threads} threads", flush=True)
    write_atomically(out, _train(sample, vocab_size, model_type, threads, special))
    tokenizer = Tokenizer(out)
    print(f"{out}: {tokenizer.vocab_size} pieces ({vocab_size} asked for), sha256 {tokenizer.sha256}")
    if sample.held_out:
        check_round_trip(tokenizer, sample.held_out, "held-out", threads)
    else:
        # So little text that the hash held nothing out: better the training's own documents than no check.
        check_round_trip(tokenizer, trained[:20], "training", threads)


def _train(sample: Sample, vocab_size: int, model_type: str, threads: int, special: Sequence[str]) -> bytes:
    """The bytes of a new model."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample.lines(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=threads,
            max_sentence_length=MAX_LINE_BYTES,
            hard_vocab_limit=False,
            minloglevel=2,
            control_symbols=list(special),
            **LOSSLESS,
        )
    except RuntimeError as error:
        raise UserError(_reason(error, vocab_size)) from error
    return model.getvalue()


def _reason(error: RuntimeError, vocab_size: int) -> str:
    """What to change after a training that failed, or else sentencepiece's own words."""
    needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    if needed:
        return f"a vocabulary of {vocab_size} is too small for this text: raise --vocab-size to {needed[1]} or more"
    return f"sentencepiece cannot train {vocab_size} pieces: {error}"


def check_round_trip(tokenizer: Tokenizer, documents: list[Document], kind: str, threads: int) -> int:
    """Encode and decode documents, print what does not come back as it was, and return how many those are."""
    encoded = tokenizer.encode_documents([document.text for document in documents], threads)
    failures = [
        document for document, ids in zip(documents, encoded, strict=True) if tokenizer.decode(ids) != document.text
    ]
    for document in failures[:_SHOWN_FAILURES]:
        hint = f" (it has U+{ord(SPACE_MARK):04X}, which decodes to a space)" if SPACE_MARK in document.text else ""
        print(f"round trip fails: {document.source}{hint}")
    size = sum(len(document.text.encode("utf-8")) for document in documents)
    tokens = sum(len(ids) for ids in encoded)
    ratio = f", {size / tokens:.2f} bytes per token" if tokens else ""
    print(f"round trip: {len(failures)} failures in {len(documents)} {kind} documents{ratio}")
    return len(failures)


def inspect(tokenizer: Tokenizer) -> None:
    """Print what a model is."""
    processor = tokenizer.processor
    ids = range(tokenizer.vocab_size)
    kinds = {
        "control": processor.is_control,
        "byte": processor.is_byte,
        "unknown": processor.is_unknown,
        "unused": processor.is_unused,
    }
    print(f"{tokenizer.file}: {_model_type(tokenizer.file)}, {tokenizer.vocab_size} pieces, sha256 {tokenizer.sha256}")
    print(f"end of document: id {tokenizer.eod_id}, {processor.id_to_piece(tokenizer.eod_id)!r}")
    for kind, belongs in kinds.items():
        members = [piece for piece in ids if belongs(piece)]
        names = ", ".join(f"{piece} {processor.id_to_piece(piece)!r}" for piece in members[:4])
        print(f"{kind}: {len(members)}" + (f" ({names}{', ...' if len(members) > 4 else ''})" if members else ""))


def _model_type(file: Path) -> str:
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(file.read_bytes())
    kind = model.trainer_spec.model_type
    return str(model.trainer_spec.ModelType.Name(kind)).lower()


def show_text(tokenizer: Tokenizer, text: str) -> None:
    """Print the tokens of a text, one a line, and whether they decode to it."""
    tokens = tokenizer.encode_documents([text])[0][:-1]
    for token in tokens.tolist():
        print(f"{token:8d} {tokenizer.processor.id_to_piece(token)!r}")
    same = tokenizer.decode(tokens) == text
    print(f"{len(tokens)} tokens, {len(text.encode('utf-8'))} bytes, round trip {'the same' if same else 'DIFFERS'}")


def show_inputs(tokenizer: Tokenizer, inputs: Sequence[str], reading: Reading, strict: bool, threads: int) -> None:
    """Print how many bytes a token has on the first documents of the inputs, and which do not come back."""
    account = Account(strict=strict)
    size = 0
    documents: list[Document] = []
    for document in read_documents(find_inputs(inputs), reading, account):
        documents.append(document)
        size += len(document.text.encode("utf-8"))
        if size >= ROUND_TRIP_BYTES:
            break
    check_round_trip(tokenizer, documents, "given", threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.tokenizer", description="Train or inspect a tokenizer.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a lossless sentencepiece model")
    add_input_arguments(command)
    command.add_argument("--vocab-size", type=positive_int, required=True, metavar="N", help="pieces wanted")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the model, e.g. data/tokenizer.model")
    command.add_argument("--type", choices=("bpe", "unigram"), default="bpe", help="kind of model (default: bpe)")
    command.add_argument(
        "--sample-bytes",
        type=positive_int,
        default=100_000_000,
        metavar="N",
        help="train on at most N bytes of text, spread evenly over the inputs (default: 100 MB)",
    )
    command.add_argument(
        "--special",
        nargs="+",
        default=[],
        metavar="PIECE",
        help=f"control symbols beside {EOD_PIECE}; text that spells one is encoded like any other text",
    )
    command = commands.add_parser("inspect", help="show what a model is and how it encodes")
    command.add_argument("model", type=Path, metavar="MODEL")
    command.add_argument("--text", metavar="STRING", help="text to encode")
    command.add_argument(
        "--eod-id", type=natural_int, metavar="N", help="control symbol that ends documents (default: the model's </s>)"
    )
    add_input_arguments(command, required=False)
    for command in commands.choices.values():
        command.add_argument(
            "--threads", type=positive_int, default=default_threads(), metavar="N", help="default: the cores at hand"
        )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    reading = reading_of(options)
    if options.command == "train":
        train(
            options.input,
            options.vocab_size,
            options.out,
            options.type,
            options.sample_bytes,
            options.threads,
            reading,
            options.strict,
            options.special,
        )
        return
    tokenizer = Tokenizer(options.model, options.eod_id)
    inspect(tokenizer)
    if options.text is not None:
        show_text(tokenizer, options.text)
    if options.input:
        show_inputs(tokenizer, options.input, reading, options.strict, options.threads)


if __name__ == "__main__":
    run_cli(main)
