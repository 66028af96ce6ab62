"""Turn documents into the shards that a training reads, and check such shards.

``python -m tools.shards build --input F... --tokenizer M --sequence-length L --out DIR`` and ``verify MANIFEST``.
"""

import argparse
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pretrain.data.files import partial_path, publish, write_atomically
from pretrain.data.manifest import FORMAT_VERSION, MANIFEST_NAME, Description, Manifest, Split, load_manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError, run_cli
from tools.arguments import positive_int, proper_fraction
from tools.documents import (
    VALIDATION_FRACTION,
    Document,
    default_threads,
    is_validation,
    make_folder,
)
from tools.inputs import Account, Reading, find_inputs, read_documents
from tools.shard_writer import ShardLayout, SplitWriter, dtype_of
from tools.verify_shards import find_faults

TOKENIZER_NAME = "tokenizer.model"

# Names of members in a tar begin with it: no dot, where webdataset ends its keys, and short enough for USTAR.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")

# Documents are encoded together up to so many characters, which keeps threads busy and memory small.
_BATCH_CHARACTERS = 4_000_000


def build(
    inputs: list[Path],
    tokenizer_file: Path,
    out: Path,
    layout: ShardLayout,
    validation_fraction: float,
    threads: int,
    force: bool,
) -> Manifest:
    """Tokenize, pack and write a data set; the same inputs and settings give the same bytes.

    Args:
        inputs: .jsonl and .txt files.
        tokenizer_file: a sentencepiece model; a copy goes beside the shards.
        out: folder of the data set, made if need be.
        layout: of the shards.
        validation_fraction: of the documents, by the hash of their text.
        threads: that encode.
        force: replace a data set that is in ``out`` already.

    Raises:
        UserError: an input or the tokenizer is unusable, ``out`` holds shards already, or a split gets no sample.
    """
    started = time.perf_counter()
    files = find_inputs(inputs)
    tokenizer = Tokenizer(tokenizer_file)
    make_folder(out)
    _clear(out, layout.name, force)
    account = Account()
    writers = {split: SplitWriter(out, split, layout, tokenizer) for split in ("train", "validation")}
    size = 0
    try:
        for documents in _batches(read_documents(files, Reading(), account)):
            encoded = tokenizer.encode_documents([document.text for document in documents], threads)
            for document, tokens in zip(documents, encoded, strict=True):
                size += len(document.text.encode("utf-8"))
                writers["validation" if is_validation(document.text, validation_fraction) else "train"].add_document(
                    tokens
                )
        for writer in writers.values():
            writer.finish()
        account.report(out / f"{layout.name}.dropped.txt")
        _require_samples(writers, layout.sequence_length)
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    manifest = _write_manifest(out, layout, tokenizer, writers)
    _print_summary(manifest, size, time.perf_counter() - started)
    return manifest


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Runs of documents with about ``_BATCH_CHARACTERS`` characters."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _clear(out: Path, name: str, force: bool) -> None:
    """Refuse to write over an earlier data set or, with ``force``, remove it: the manifest first."""
    manifest = out / MANIFEST_NAME
    names = {name}
    if manifest.exists():
        if not force:
            raise UserError(f"{manifest} exists: choose another --out, or replace that data set by --force")
        names |= _name_in(manifest)
    pattern = re.compile(rf"({'|'.join(names)})-(train|validation)-\d{{6}}\.(tar|idx|idx\.json)(\.tmp)?")
    ours = {path for path in out.iterdir() if pattern.fullmatch(path.name)}
    if ours and not force:
        raise UserError(
            f"{out} holds shards such as {min(ours).name} but no manifest, perhaps of a build that was interrupted: "
            "choose another --out, or replace them by --force"
        )
    manifest.unlink(missing_ok=True)
    for path in ours:
        path.unlink()


def _name_in(manifest: Path) -> set[str]:
    """The name in an old manifest, which may be damaged and name nothing."""
    try:
        content = json.loads(manifest.read_bytes())
    except ValueError:
        return set()
    name = content.get("name") if isinstance(content, dict) else None
    return {name} if isinstance(name, str) and _NAME.fullmatch(name) else set()


def _require_samples(writers: dict[str, SplitWriter], sequence_length: int) -> None:
    """UserError when a split got no sample."""
    remedy = {"train": "lower --validation-fraction", "validation": "raise --validation-fraction"}
    for split, writer in writers.items():
        if not writer.samples:
            raise UserError(
                f"the {split} split has {writer.documents} documents with {writer.dropped_tokens} tokens, too few for "
                f"one sample of {sequence_length + 1}: {remedy[split]}, lower --sequence-length, "
                "or give more documents (tools.corpus --max-document-bytes makes many of a long one)"
            )


def unigram_entropies(writers: dict[str, SplitWriter]) -> dict[str, float]:
    """Per split, nats per token under the unigram distribution of the training split.

    Training: its own entropy. Validation: cross entropy under add-one smoothed training frequencies, since a validation
    token may be absent from the training split.
    """
    counts = writers["train"].token_counts
    seen = counts[counts > 0]
    entropy = -np.sum(seen * np.log(seen / counts.sum())) / counts.sum()
    others = writers["validation"].token_counts
    cross_entropy = -np.sum(others * np.log((counts + 1) / (counts.sum() + len(counts)))) / others.sum()
    # Rounded, so that the last bit of a machine's logarithm does not enter the fingerprint.
    return {"train": round(float(entropy), 6), "validation": round(float(cross_entropy), 6)}


def _write_manifest(out: Path, layout: ShardLayout, tokenizer: Tokenizer, writers: dict[str, SplitWriter]) -> Manifest:
    """Copy the tokenizer, write the manifest last, and read it back."""
    copy = out / TOKENIZER_NAME
    shutil.copyfile(tokenizer.file, partial_path(copy))
    publish(copy)
    entropies = unigram_entropies(writers)
    description = Description(
        version=FORMAT_VERSION,
        name=layout.name,
        sequence_length=layout.sequence_length,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        dtype=dtype_of(tokenizer.vocab_size),
        tokenizer_file=TOKENIZER_NAME,
        tokenizer_sha256=tokenizer.sha256,
        token_counts=tuple(writers["train"].token_counts.tolist()),
        splits={
            split: Split(
                documents=writer.documents,
                tokens=writer.tokens,
                samples=writer.samples,
                dropped_tokens=writer.dropped_tokens,
                unigram_entropy=entropies[split],
                shards=tuple(writer.shards),
            )
            for split, writer in writers.items()
        },
    )
    write_atomically(out / MANIFEST_NAME, _manifest_text(description))
    return load_manifest(out / MANIFEST_NAME)


def _manifest_text(description: Description) -> bytes:
    """JSON to be read by people too: indented, with the long list of counts in one line at the end."""
    content = asdict(description)
    counts = json.dumps(content.pop("token_counts"))
    return (json.dumps(content, indent=2)[:-2] + f',\n  "token_counts": {counts}\n}}\n').encode("ascii")


def _print_summary(manifest: Manifest, size: int, seconds: float) -> None:
    for name, split in manifest.splits.items():
        print(
            f"{name}: {split.documents} documents, {split.tokens} tokens, {split.samples} samples, "
            f"{len(split.shards)} shards, {split.dropped_tokens} tokens dropped, "
            f"unigram entropy {split.unigram_entropy:.4f} nats"
        )
    print(f"{size / 1e6:.2f} MB of text in {seconds:.1f} s")
    print(f"{manifest.directory / MANIFEST_NAME}: fingerprint {manifest.fingerprint}")


def verify(manifest_file: Path) -> None:
    """Print one line per fault of a data set; UserError when there is any."""
    manifest = load_manifest(manifest_file)
    faults = 0
    for fault in find_faults(manifest):
        faults += 1
        print(fault)
    if faults:
        raise UserError(f"{faults} faults in {manifest.directory}: restore these files or build the shards anew")
    print(f"{manifest.directory} is sound: fingerprint {manifest.fingerprint}")


def _dataset_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 40 letters, digits, - or _")
    return text


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.shards", description="Build or verify a data set.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="tokenize and pack documents into shards")
    command.add_argument("--input", type=Path, nargs="+", required=True, metavar="F", help=".jsonl and .txt files")
    command.add_argument("--tokenizer", type=Path, required=True, metavar="M", help="a sentencepiece model")
    command.add_argument(
        "--sequence-length", type=positive_int, required=True, metavar="L", help="longest sequence to train with"
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the data set")
    command.add_argument("--name", type=_dataset_name, default="data", help="of the data set (default: data)")
    command.add_argument(
        "--validation-fraction",
        type=proper_fraction,
        default=VALIDATION_FRACTION,
        metavar="X",
        help="share of the documents held out (default: %(default)s)",
    )
    command.add_argument(
        "--samples-per-member", type=positive_int, default=128, metavar="N", help="default: %(default)s"
    )
    command.add_argument(
        "--members-per-shard", type=positive_int, default=256, metavar="N", help="default: %(default)s"
    )
    command.add_argument(
        "--threads", type=positive_int, default=default_threads(), metavar="N", help="default: the cores at hand"
    )
    command.add_argument("--force", action="store_true", help="replace a data set that is there already")
    command = commands.add_parser("verify", help="compare every byte with the manifest")
    command.add_argument("manifest", type=Path, metavar="MANIFEST", help="manifest.json, or its folder")
    options = parser.parse_args(arguments)
    if options.command == "verify":
        verify(options.manifest)
        return
    layout = ShardLayout(
        name=options.name,
        sequence_length=options.sequence_length,
        samples_per_member=options.samples_per_member,
        members_per_shard=options.members_per_shard,
    )
    build(
        options.input,
        options.tokenizer,
        options.out,
        layout,
        options.validation_fraction,
        options.threads,
        options.force,
    )


if __name__ == "__main__":
    run_cli(main)
