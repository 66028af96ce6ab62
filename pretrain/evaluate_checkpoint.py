"""``python -m pretrain evaluate CHECKPOINT``: perplexity and bits per byte of texts and shards, and zero-shot tasks.

Everything that is asked for is opened before the model is: a mistake is told before anything is computed.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_ext import ParallelSettings
from pretrain import parallel
from pretrain.checkpoint import store
from pretrain.config import Config
from pretrain.data.manifest import NO_TOKENIZER, Manifest, load_manifest
from pretrain.data.reader import ShardReader
from pretrain.data.text import NoTextError, text_of_json, text_of_plain
from pretrain.data.text_bytes import TextBytes, bits_per_nat
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.inspect_checkpoint import find_checkpoint, find_tokenizer, load_model, recorded_config
from pretrain.launch import read_launch
from pretrain.scoring import Scorer, windows

_SAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate, and on what.

    Attributes:
        path: a checkpoint, or a run's folder, whose newest one is meant.
        texts: files of UTF-8, each a document, or ``.jsonl``, a document a line in its field ``text``.
        shards: manifests of data sets of the model's tokenizer.
        split: of the shards.
        samples: of each data set at most, the first ones; None for all.
        tasks: names of the ready list or YAML files of lm-evaluation-harness; ``paper`` is the whole list.
        task_data: folder with the files of the ready list's tasks.
        limit: documents of each task at most, the first ones; None for all.
        manifest: where the run's manifest is now, if it was moved.
        precision: of the computation; None for that of the run.
        micro_batch: sequences at a time; None for that of the run.
        as_json: print one JSON object instead of text.
    """

    path: Path
    texts: Sequence[Path] = ()
    shards: Sequence[str] = ()
    split: str = "validation"
    samples: int | None = None
    tasks: Sequence[str] = ()
    task_data: Path | None = None
    limit: int | None = None
    manifest: str | None = None
    precision: Literal["bf16", "fp32"] | None = None
    micro_batch: int | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Figures:
    """How a model reads a text or a data set.

    Attributes:
        name: of the file or the data set.
        tokens: that were predicted.
        text_bytes: of UTF-8 that they stand for; None where their tokenizer is not known.
        loss: nats per token.
        perplexity: its exponential, per token.
        bits_per_byte: by which models of different tokenizers can be compared; None where the bytes are not known.
    """

    name: str
    tokens: int
    text_bytes: int | None
    loss: float
    perplexity: float
    bits_per_byte: float | None


def figures(name: str, nats: float, tokens: int, text_bytes: int | None) -> Figures:
    """From the sum of the losses."""
    loss = nats / tokens
    factor = bits_per_nat(tokens, text_bytes) if text_bytes else None
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Figures(name, tokens, text_bytes, loss, perplexity, None if factor is None else loss * factor)


def run_evaluation(asked: Evaluation) -> None:
    """Print what was asked for.

    Raises:
        UserError: for whatever the user can mend.
    """
    if not (asked.texts or asked.shards or asked.tasks):
        raise UserError("nothing to evaluate on: give --text FILE, --shards MANIFEST or --tasks NAME")
    checkpoint = find_checkpoint(asked.path)
    record = store.read_record(checkpoint)
    config = _with_wishes(recorded_config(checkpoint, record), asked)
    texts = [(file, read_documents(file)) for file in asked.texts]
    data = [_load_shards(place, record, config, asked.split) for place in asked.shards]
    tokenizer = find_tokenizer(config, record, asked.manifest) if asked.texts or asked.tasks else None
    tasks = _load_tasks(asked)
    place = parallel.start(read_launch({}), ParallelSettings(), seed=0)
    try:
        module = load_model(config, checkpoint, record["vocab_size"], place.device)
        eod_id = tokenizer.eod_id if tokenizer else data[0].manifest.eod_id
        vocab_size = tokenizer.vocab_size if tokenizer else data[0].manifest.vocab_size
        scorer = Scorer(module, vocab_size, eod_id, config.train.micro_batch, config.data.separate_documents)
        length = config.model.sequence_length
        found = [text_figures(scorer, tokenizer, str(file), texts, length) for file, texts in texts if tokenizer]
        found += [shard_figures(scorer, reader, asked.samples) for reader in data]
        task_rows = _run_tasks(tasks, scorer, tokenizer, length, asked.limit) if tokenizer else []
    finally:
        parallel.stop()
    facts = {"checkpoint": str(checkpoint), "step": record["state"]["step"], "precision": config.train.precision}
    if asked.as_json:
        print(json.dumps(facts | {"texts": [asdict(each) for each in found], "tasks": task_rows}))
    else:
        print("\n".join(_lines(facts, found, task_rows)))


def _with_wishes(config: Config, asked: Evaluation) -> Config:
    wishes: dict[str, Any] = {"precision": asked.precision, "micro_batch": asked.micro_batch}
    given = {name: value for name, value in wishes.items() if value is not None}
    return config.model_copy(update={"train": config.train.model_copy(update=given)})


def read_documents(file: Path) -> list[str]:
    """The documents of a text file, as they are.

    Raises:
        UserError: it cannot be read, or a document of it holds no text.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"--text {file} cannot be read: {error.strerror}") from None
    if file.suffix != ".jsonl":
        try:
            return [text_of_plain(content, len(content))]
        except NoTextError as error:
            raise UserError(f"--text {file}: {error.kind}") from None
    documents = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            documents.append(text_of_json(line, "text", len(line)))
        except NoTextError as error:
            raise UserError(f"--text {file}, line {number}: {error.kind}") from None
    if not documents:
        raise UserError(f"--text {file} is empty")
    return documents


def _load_shards(place: str, record: dict[str, Any], config: Config, split: str) -> ShardReader:
    manifest = load_manifest(place)
    trained = record["tokenizer_sha256"]
    if manifest.tokenizer_sha256 != trained:
        raise UserError(
            f"--shards {place} has tokens of {_tokenizer(manifest.tokenizer_sha256)}, the model of "
            f"{_tokenizer(trained)}; evaluate on the text itself by --text, and compare bits per byte"
        )
    if manifest.vocab_size > record["vocab_size"]:
        raise UserError(
            f"--shards {place} has a vocabulary of {manifest.vocab_size}, the model one of {record['vocab_size']}"
        )
    return ShardReader(manifest, split, config.model.sequence_length, lambda fault: print(f"warning: {fault}"))


def _tokenizer(sha256: str) -> str:
    return "an unknown tokenizer" if sha256 == NO_TOKENIZER else f"the tokenizer {sha256[:12]}"


def text_figures(scorer: Scorer, tokenizer: Tokenizer, name: str, documents: Sequence[str], length: int) -> Figures:
    """Every byte of every document counts, its first token being predicted from the end of another document."""
    encoded = [tokens[:-1].tolist() for tokens in tokenizer.encode_documents(documents)]
    spans = [span for tokens in encoded for span in windows(tokens, tokenizer.eod_id, length)]
    nats = -sum(likelihood.log for likelihood in scorer.spans(spans))
    text_bytes = sum(len(document.encode()) for document in documents)
    return figures(name, nats, sum(len(tokens) for tokens in encoded), text_bytes)


def shard_figures(scorer: Scorer, reader: ShardReader, most: int | None) -> Figures:
    """Over the first ``most`` samples, as validation in a run has it; bad samples are left out.

    Raises:
        UserError: no sample can be read.
    """
    manifest = reader.manifest
    counter = _text_bytes(manifest)
    nats, tokens, text_bytes = 0.0, 0, 0
    for first in range(0, min(most or len(reader), len(reader)), _SAMPLES_AT_ONCE):
        last = min(first + _SAMPLES_AT_ONCE, most or len(reader), len(reader))
        read = reader.read_rows(np.arange(first, last))
        rows = read.tokens[read.sound]
        if not len(rows):
            continue
        nats += float(scorer.samples(torch.from_numpy(rows)).sum(dtype=torch.float64))
        tokens += rows[:, 1:].size
        text_bytes += int(counter.count(rows[:, :-1], rows[:, 1:]).sum()) if counter else 0
    if not tokens:
        raise UserError(f"{manifest.folder.where}: none of the samples can be read")
    return figures(f"{manifest.name} in {manifest.folder.where}", nats, tokens, text_bytes if counter else None)


def _text_bytes(manifest: Manifest) -> TextBytes | None:
    file = manifest.tokenizer_file
    return TextBytes(Tokenizer(file, manifest.eod_id)) if file else None


def _load_tasks(asked: Evaluation) -> list[Any]:
    if not asked.tasks:
        return []
    from pretrain.harness.tasks import load_tasks

    return load_tasks(asked.tasks, asked.task_data)


def _run_tasks(
    tasks: Sequence[Any], scorer: Scorer, tokenizer: Tokenizer, length: int, limit: int | None
) -> list[dict[str, Any]]:
    if not tasks:
        return []
    from pretrain.harness.model import CheckpointModel
    from pretrain.harness.tasks import run_tasks

    return run_tasks(tasks, CheckpointModel(scorer, tokenizer, length), limit)


def _lines(facts: dict[str, Any], found: Sequence[Figures], tasks: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{facts['checkpoint']}, step {facts['step']}, computed in {facts['precision']}"]
    if found:
        heads = ("tokens", "bytes", "loss", "perplexity", "bits per byte")
        lines += ["", "".join(f"{head:>14}" for head in heads) + "  text (loss: nats per token)"]
    for each in found:
        cells = (
            f"{each.tokens:,}",
            "unknown" if each.text_bytes is None else f"{each.text_bytes:,}",
            f"{each.loss:.4f}",
            _short(each.perplexity, 2),
            "unknown" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}",
        )
        lines.append("".join(f"{cell:>14}" for cell in cells) + f"  {each.name}")
    if tasks:
        lines += ["", f"{'documents':>14}{'value':>14}{'+-':>14}  task, metric"]
    for row in tasks:
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        lines.append(f"{row['documents']:>14,}{_short(row['value'], 4):>14}{error:>14}  {row['task']}, {row['metric']}")
    return lines


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value < 1e7 else f"{value:.3e}"
