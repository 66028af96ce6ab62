"""``python -m pretrain inspect CHECKPOINT``: what it holds, how a configuration differs, its model reading a text."""

import dataclasses
import json
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megatron_ext import Geometry, GeometryProbe, ParallelSettings, build_model, with_defaults
from pretrain import parallel
from pretrain.checkpoint import store
from pretrain.checkpoint.record import RECORD
from pretrain.checkpoint.weights import count_parameters, load_weights
from pretrain.config import Config, with_scheme_defaults
from pretrain.config_file import load_config
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.urls import is_remote, local_path
from pretrain.datasets import named
from pretrain.errors import UserError
from pretrain.launch import read_launch
from pretrain.monitor.geometry_table import LEGEND, geometry_rows, geometry_table
from pretrain.resume import changed_settings
from pretrain.rules import check_config

# Sentencepiece makes no longer pieces unless asked to.
_LONGEST_PIECE = 16
_INDENT = 14


@dataclass(frozen=True)
class Inspection:
    """What to look at.

    Attributes:
        path: a checkpoint, or a run's folder, whose newest one is meant.
        text: a file of UTF-8 text for the model to read; None only lists the checkpoint.
        sequences: how many sequences of the text at most.
        manifest: where the run's manifest is now, if it was moved.
        as_json: print one JSON object instead of text.
        config: a configuration to compare the run's settings with.
    """

    path: Path
    text: Path | None
    sequences: int
    manifest: str | None
    as_json: bool
    config: Path | None = None


@dataclass(frozen=True)
class Samples:
    """A text cut for the model.

    Attributes:
        rows: int64 [samples, sequence_length + 1]; a row's last token is the next one's first.
        bytes: of UTF-8 text in the tokens that are predicted.
    """

    rows: Tensor
    bytes: int


@dataclass(frozen=True)
class Reading:
    """How a model read samples.

    Attributes:
        loss: nats per token.
        geometry: of the residual stream, over the same tokens.
    """

    loss: float
    geometry: Geometry


def run_inspection(asked: Inspection) -> None:
    """Print what was asked for.

    Raises:
        UserError: for whatever the user can mend.
    """
    checkpoint = find_checkpoint(asked.path)
    record = store.read_record(checkpoint)
    config = recorded_config(checkpoint, record)
    if asked.text:
        _open_text(asked.text).close()  # a mistake is told before anything else
    facts: dict[str, Any] = {"checkpoint": str(checkpoint), "parameters": count_parameters(checkpoint)}
    if asked.config:
        other = load_config(asked.config, [])
        check_config(other)
        facts["differences"] = changed_settings(with_scheme_defaults(other), record)
    if asked.as_json:
        facts["record"] = record
    else:
        print("\n".join(described(facts, record, config)), flush=True)
        if asked.config:
            print("\n".join(_differences(asked.config, facts["differences"])), flush=True)
    if asked.text:
        tokenizer = find_tokenizer(config, record, asked.manifest)
        samples = read_samples(asked.text, tokenizer, config.model.sequence_length, asked.sequences)
        place = parallel.start(read_launch({}), ParallelSettings(), seed=0)
        try:
            module = load_model(config, checkpoint, record["vocab_size"], place.device)
            reading = read(module, samples.rows, config.train.micro_batch)
        finally:
            parallel.stop()
        settings = with_defaults(config.model.residual)
        bits = bits_per_byte(reading.loss, samples)
        if asked.as_json:
            rows = list(geometry_rows(reading.geometry, settings))
            facts |= {"loss": reading.loss, "bits_per_byte": bits, "samples": len(samples.rows), "geometry": rows}
        else:
            print("\n".join(_report(asked.text, samples, reading.loss, bits)))
            print("\n".join([*geometry_table(reading.geometry, settings), *LEGEND]))
    if asked.as_json:
        print(json.dumps(facts))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` is, or the newest one of the run that it is; UserError when there is none."""
    path = path.resolve()
    if not os.path.isdir(path):  # pathlib's own raises where a name is too long
        raise UserError(f"{path} is no folder; name a run's folder or one of its checkpoints/step-... folders")
    if (path / RECORD).exists() or path.name.startswith("step-"):
        return path
    found = store.newest(store.checkpoint_folder(path)) or store.newest(path)
    if found is None:
        raise UserError(f"{path} holds no checkpoint; name a run's folder or one of its checkpoints/step-... folders")
    return found


def recorded_config(checkpoint: Path, record: dict[str, Any]) -> Config:
    """The settings that the checkpoint's run had; UserError when they are not of this version."""
    try:
        config = Config.model_validate(record["config"])
        with_defaults(config.model.residual)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"])
        raise UserError(
            f"{checkpoint / RECORD}: config.{name}: {fault['msg']}; use the version that saved it"
        ) from None
    except ValueError as error:
        raise UserError(f"{checkpoint / RECORD}: {error}; use the version that saved it") from None
    return config


def described(facts: dict[str, Any], record: dict[str, Any], config: Config) -> list[str]:
    """What the checkpoint is and holds, as lines of at most 100 characters."""
    model, state, layout = config.model, record["state"], config.parallel
    files = {name: found["bytes"] for name, found in record["files"].items()}
    residual = dataclasses.asdict(with_defaults(model.residual))
    said = [f"{name} {_plain(value)}" for name, value in residual.items() if name != "scheme" and value is not None]
    largest = max(files, key=lambda name: files[name])
    lines = {
        "checkpoint": facts["checkpoint"],
        "step": f"{state['step']} of {config.train.steps}, {state['tokens']:,} tokens, {state['train_seconds']:.1f} s",
        "scheme": ", ".join([model.residual.scheme, *said]),
        "model": f"{model.num_layers} layers x {model.hidden_size} hidden x {model.num_attention_heads} heads, "
        f"sequence {model.sequence_length}, vocabulary {record['vocab_size']}",
        "parameters": f"{facts['parameters']:,}",
        "saved in": f"tp {layout.tp}{', sequence parallel' if layout.sp else ''}, pp {layout.pp}, "
        f"dp {record['dp_size']}, ZeRO-{config.zero.stage}, {config.train.precision}",
        "validation": _validation(state),
        "data": ", ".join(f"{name}, fingerprint {found[:12]}" for name, found in record["datasets"].items()),
        "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        "git revision": str(record.get("git_revision")),
        "files": f"{len(files)}, {sum(files.values()):,} bytes, the largest {largest} of {files[largest]:,}",
    }
    return [line for name, text in lines.items() for line in _wrapped(name, text)]


def _validation(state: dict[str, Any]) -> str:
    found = state["callbacks"].get("validation", {})
    loss = found.get("loss")  # none is known before the first evaluation
    return "none so far" if loss is None else f"loss {loss:.4f} at step {found['step']}"


def _differences(file: Path, differences: Sequence[str]) -> list[str]:
    return [f"{'settings':<{_INDENT}}{len(differences)} are others in {file}{':' if differences else ''}"] + [
        " " * _INDENT + difference for difference in differences
    ]


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{name:<{_INDENT}}{text}", 100, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
    )


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def find_tokenizer(config: Config, record: dict[str, Any], moved_to: str | None) -> Tokenizer:
    """The tokenizer of the run's data; ``moved_to`` as for :func:`find_manifest`.

    Raises:
        UserError: it is not there, or another one than the model was trained with.
    """
    if config.data.mode == "stream":
        if moved_to is not None:
            raise UserError(f"--manifest {moved_to}: the model was trained on raw text without one; remove it")
        assert config.data.tokenizer is not None, "a rule sees to it"
        tokenizer = Tokenizer(config.data.tokenizer, config.data.eod_id)
        if tokenizer.sha256 != record["tokenizer_sha256"]:
            raise UserError(
                f"tokenizer {tokenizer.file} is {tokenizer.sha256[:12]}, but the model was trained with "
                f"{record['tokenizer_sha256'][:12]}; put that one there"
            )
        return tokenizer
    manifest = find_manifest(config, record, moved_to)
    if manifest.tokenizer_file is None:
        raise UserError(f"text cannot be encoded: {manifest.directory} came without a sentencepiece model")
    return Tokenizer(manifest.tokenizer_file, manifest.eod_id)


def find_manifest(config: Config, record: dict[str, Any], moved_to: str | None) -> Manifest:
    """A manifest of the run's data, at ``moved_to`` if given, else its first data set's.

    Raises:
        UserError: it is not there, damaged, or another data set's.
    """
    path = moved_to or named(config.data)[0].manifest
    if moved_to is None and not is_remote(path) and not local_path(path).exists():
        raise UserError(f"the run's data.manifest={path} does not exist here; say where it is by --manifest PATH")
    manifest = load_manifest(path)
    trained_on = list(record["datasets"].values())
    if manifest.fingerprint not in trained_on:
        raise UserError(
            f"{path} has fingerprint {manifest.fingerprint[:12]}, but the model was trained on "
            f"{', '.join(found[:12] for found in trained_on)}; name the manifest of the run's own data by "
            f"--manifest PATH"
        )
    return manifest


def _open_text(file: Path) -> TextIO:
    try:
        return file.open(encoding="utf-8", newline="")  # newlines as they are
    except OSError as error:
        raise UserError(f"--text {file} cannot be read: {error.strerror}") from None


def read_samples(file: Path, tokenizer: Tokenizer, sequence_length: int, limit: int) -> Samples:
    """The first ``limit`` whole samples of a text; what is left of it stays out.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or does not fill one sample.
    """
    wanted = limit * sequence_length + 1
    try:
        with _open_text(file) as stream:
            text = stream.read(wanted * _LONGEST_PIECE)
    except UnicodeDecodeError as error:
        raise UserError(f"--text {file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text:
        raise UserError(f"--text {file} is empty")
    tokens: npt.NDArray[np.int32] = tokenizer.encode_documents([text])[0][:-1]  # without the end of the document
    samples = min(limit, (len(tokens) - 1) // sequence_length)
    if samples < 1:
        raise UserError(
            f"--text {file} has {len(tokens)} tokens, but one sequence of the model takes {sequence_length + 1}; "
            f"give a longer text"
        )
    used = tokens[: samples * sequence_length + 1]
    starts = range(0, samples * sequence_length, sequence_length)
    rows = np.stack([used[start : start + sequence_length + 1] for start in starts]).astype(np.int64)
    predicted = len(tokenizer.decode(used).encode()) - len(tokenizer.decode(used[:1]).encode())
    return Samples(torch.from_numpy(rows), predicted)


def load_model(config: Config, checkpoint: Path, vocab_size: int, device: torch.device) -> nn.Module:
    """The whole model of a checkpoint, in the run's precision; needs the process groups of one process."""
    settings = dataclasses.replace(
        config.model,
        vocab_size=vocab_size,
        recompute="none",
        kernels="auto",  # the run may have had a GPU
        # Any start will do for what is loaded, and this one needs no token counts.
        output_bias="none" if config.model.output_bias == "none" else "learned",
    )
    module = build_model(
        settings,
        ParallelSettings(),
        dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        device=device,
        seed=0,
        token_counts=None,
    )
    load_weights(module, checkpoint, vocab_size)
    return module


@torch.no_grad()
def read(module: nn.Module, rows: Tensor, micro_batch: int) -> Reading:
    """Let the model predict every token of ``rows`` [samples, sequence + 1] but the first of each."""
    module.eval()
    device = next(module.parameters()).device
    positions = torch.arange(rows.shape[1] - 1, device=device)
    probe = GeometryProbe(module)
    sums = []
    with probe.recording():
        for batch in torch.split(rows.to(device), micro_batch):
            tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            losses = module(tokens, positions.expand_as(tokens), None, labels=labels)
            sums.append(losses.sum(dtype=torch.float64))
    return Reading(float(torch.stack(sums).sum()) / (rows.shape[0] * (rows.shape[1] - 1)), probe.reduce())


def bits_per_byte(loss: float, samples: Samples) -> float:
    """From nats per token; nan if the tokens stand for no text."""
    predicted = samples.rows.shape[0] * (samples.rows.shape[1] - 1)
    return loss * predicted / (samples.bytes * math.log(2)) if samples.bytes else math.nan


def _report(text: Path, samples: Samples, loss: float, bits: float) -> Sequence[str]:
    count, length = samples.rows.shape[0], samples.rows.shape[1] - 1
    return (
        f"{'text':<{_INDENT}}{text}: the first {count} sequences of {length} tokens, {samples.bytes:,} bytes",
        f"{'loss':<{_INDENT}}{loss:.4f} nats per token, {bits:.4f} bits per byte",
        "",
    )
