"""Train a lossless sentencepiece model, and look at one.

``python -m tools.tokenizer train --input F... --vocab-size N --out DIR/tokenizer.model`` and ``inspect MODEL``.
"""

import argparse
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece

from pretrain.data.files import write_atomically
from pretrain.data.tokenizer import SPACE_MARK, Tokenizer
from pretrain.errors import UserError, run_cli
from tools.arguments import positive_int
from tools.documents import (
    VALIDATION_FRACTION,
    Document,
    Skipped,
    check_inputs,
    default_threads,
    hash_fraction,
    is_validation,
    make_folder,
    read_documents,
)

EOD_PIECE = "<|endoftext|>"

# sentencepiece leaves longer lines out of the training without a word.
MAX_LINE_BYTES = 4192

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

# The round trip is tried on documents up to so many bytes.
ROUND_TRIP_BYTES = 20_000_000
_SHOWN_FAILURES = 10


@dataclass
class Sample:
    """The text that a training reads, and what was kept out of it.

    Attributes:
        fraction: of the documents that are trained on, chosen by the hash of their text.
        documents: trained on so far.
        size: bytes of UTF-8 text trained on so far.
        held_out: documents for the round trip; those that tools.shards puts into its validation split by default, so
            that the vocabulary is not fitted to them either.
        first_trained: a few of the documents trained on.
    """

    fraction: float
    documents: int = 0
    size: int = 0
    held_out: list[Document] = field(default_factory=list)
    first_trained: list[Document] = field(default_factory=list)
    _held_out_size: int = 0

    def lines(self, documents: Iterator[Document]) -> Iterator[str]:
        """The lines to train on."""
        for document in documents:
            size = len(document.text.encode("utf-8"))
            if is_validation(document.text, VALIDATION_FRACTION):
                if self._held_out_size + size <= ROUND_TRIP_BYTES:
                    self._held_out_size += size
                    self.held_out.append(document)
            elif hash_fraction(document.text, "sample") < self.fraction:
                self.documents += 1
                self.size += size
                if self.documents <= 20:
                    self.first_trained.append(document)
                yield from training_lines(document.text)


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


def train(inputs: list[Path], vocab_size: int, out: Path, model_type: str, sample_bytes: int, threads: int) -> None:
    """Train a model, write it, and check on held-out documents that it loses nothing.

    Args:
        inputs: .jsonl and .txt files.
        vocab_size: pieces wanted; the model may get fewer from little text, never more.
        out: file of the model.
        model_type: ``bpe`` or ``unigram``.
        sample_bytes: of input to train on, about; a share of the documents, spread evenly, when the input has more.
        threads: of the training and of the check.

    Raises:
        UserError: an input is missing, ``out`` is a folder, there is no text, or it has more characters than the
            vocabulary has pieces.
    """
    check_inputs(inputs)
    if out.is_dir():
        raise UserError(f"output {out} is a folder: name the file of the model, such as {out / 'tokenizer.model'}")
    make_folder(out.parent)
    skipped = Skipped(out.with_suffix(".skipped.txt"))
    sample = Sample(fraction=min(1.0, sample_bytes / max(1, sum(path.stat().st_size for path in inputs))))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample.lines(read_documents(inputs, skipped)),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=threads,
            max_sentence_length=MAX_LINE_BYTES,
            hard_vocab_limit=False,
            minloglevel=2,
            **LOSSLESS,
        )
    except RuntimeError as error:
        skipped.report()
        if not sample.documents:
            raise UserError("no text to train on: give more documents or raise --sample-bytes") from error
        raise UserError(_reason(error, vocab_size)) from error
    skipped.report()
    write_atomically(out, model.getvalue())
    tokenizer = Tokenizer(out)
    print(f"trained on {sample.documents} documents, {sample.size / 1e6:.2f} MB, {threads} threads")
    print(f"{out}: {tokenizer.vocab_size} pieces ({vocab_size} asked for), sha256 {tokenizer.sha256}")
    if sample.held_out:
        check_round_trip(tokenizer, sample.held_out, "held-out", threads)
    else:
        # So little text that the hash held nothing out: better the training's own documents than no check.
        check_round_trip(tokenizer, sample.first_trained, "training", threads)


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


def inspect(model: Path, text: str | None) -> None:
    """Print what a model is, and how it encodes ``text``."""
    tokenizer = Tokenizer(model)
    processor = tokenizer.processor
    ids = range(tokenizer.vocab_size)
    kinds = {
        "control": processor.is_control,
        "byte": processor.is_byte,
        "unknown": processor.is_unknown,
        "unused": processor.is_unused,
    }
    print(f"{model}: {tokenizer.vocab_size} pieces, sha256 {tokenizer.sha256}")
    print(f"end of document: id {tokenizer.eod_id}, {processor.id_to_piece(tokenizer.eod_id)!r}")
    for kind, belongs in kinds.items():
        members = [piece for piece in ids if belongs(piece)]
        names = ", ".join(repr(processor.id_to_piece(piece)) for piece in members[:4])
        print(f"{kind}: {len(members)}" + (f" ({names}{', ...' if len(members) > 4 else ''})" if members else ""))
    if text is None:
        return
    tokens = tokenizer.encode_documents([text])[0][:-1]
    for token in tokens.tolist():
        print(f"{token:8d} {processor.id_to_piece(token)!r}")
    same = tokenizer.decode(tokens) == text
    print(f"{len(tokens)} tokens, {len(text.encode('utf-8'))} bytes, round trip {'the same' if same else 'DIFFERS'}")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.tokenizer", description="Train or inspect a tokenizer.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a lossless sentencepiece model")
    command.add_argument("--input", type=Path, nargs="+", required=True, metavar="F", help=".jsonl and .txt files")
    command.add_argument("--vocab-size", type=positive_int, required=True, metavar="N", help="pieces wanted")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the model, e.g. data/tokenizer.model")
    command.add_argument("--type", choices=("bpe", "unigram"), default="bpe", help="kind of model (default: bpe)")
    command.add_argument(
        "--sample-bytes",
        type=positive_int,
        default=100_000_000,
        metavar="N",
        help="train on about N bytes of the input, spread evenly over it (default: 100 MB)",
    )
    command.add_argument(
        "--threads", type=positive_int, default=default_threads(), metavar="N", help="default: the cores at hand"
    )
    command = commands.add_parser("inspect", help="show what a model is and how it encodes")
    command.add_argument("model", type=Path, metavar="MODEL")
    command.add_argument("--text", metavar="STRING", help="text to encode")
    options = parser.parse_args(arguments)
    if options.command == "train":
        train(options.input, options.vocab_size, options.out, options.type, options.sample_bytes, options.threads)
    else:
        inspect(options.model, options.text)


if __name__ == "__main__":
    run_cli(main)
