"""What is in a data set, for people."""

from itertools import islice
from pathlib import Path

from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from tools.sharding.description import print_summary
from tools.sharding.scan import blocks_of


def show(place: Path | str, samples: int) -> None:
    """Print a data set's facts and the first samples of each split, decoded where there is a tokenizer.

    Raises:
        UserError: it is remote, damaged, or its tokenizer is another one.
    """
    manifest = load_manifest(place)
    print(
        f"{manifest.name}: sequence length {manifest.sequence_length}, vocabulary {manifest.vocab_size}, "
        f"end of document {manifest.eod_id}, stored as {manifest.dtype}, tokenizer {manifest.tokenizer_sha256}"
    )
    print_summary(manifest)
    statistics = manifest.statistics
    if statistics is not None:
        dropped = "".join(f", {count} dropped as {kind}" for kind, count in statistics.dropped.items())
        print(
            f"{statistics.records} records read: {statistics.documents} documents, "
            f"{statistics.duplicates} duplicates{dropped}"
        )
        ratio = f", {statistics.bytes_per_token} bytes per token" if statistics.bytes_per_token else ""
        print(f"{statistics.text_bytes} bytes of text, {statistics.document_tokens} tokens{ratio}")
    for split in manifest.splits:
        _show_samples(manifest, split, samples)


def _show_samples(manifest: Manifest, split: str, samples: int) -> None:
    tokenizer = Tokenizer(manifest.tokenizer_file, manifest.eod_id) if manifest.tokenizer_file else None
    if tokenizer is not None and tokenizer.sha256 != manifest.tokenizer_sha256:
        raise UserError(f"tokenizer {manifest.tokenizer_file} is not the one that the shards were built with")
    rows = (row for block in blocks_of(manifest, split) for row in block)
    for number, row in enumerate(islice(rows, samples)):
        ends = int((row == manifest.eod_id).sum())
        print(f"== {split} sample {number}: {len(row)} tokens, {ends} ends of documents")
        if tokenizer is None:
            print(row.tolist())
            continue
        parts: list[list[int]] = [[]]
        for token in row.tolist():
            if token == manifest.eod_id:
                parts.append([])
            else:
                parts[-1].append(token)
        print("\n-- end of document --\n".join(tokenizer.processor.decode(part) for part in parts))
