"""Start a run from weights that are there: a folder of weights alone, or the weights of any checkpoint.

A folder of weights holds fp32 tensors as a checkpoint does, without optimizer state, and ``weights.json``.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from megatron_ext import ModelSettings, with_defaults
from megatron_ext.initialize import cut_for_this_rank, global_names, whole_shape
from pretrain.checkpoint import store
from pretrain.checkpoint.contents import write_contents
from pretrain.checkpoint.files import DamageError, FileFacts, find_damage, open_file, require_size
from pretrain.checkpoint.loading import agree
from pretrain.checkpoint.weights import MASTERS, StoredWeights
from pretrain.checkpoint.writing import Piece, write_pieces
from pretrain.config import Config
from pretrain.deepspeed_compat import create_adam_state, finish_load, owned_fragment, owned_range
from pretrain.engine import Engine
from pretrain.errors import UserError
from pretrain.inspect_checkpoint import find_checkpoint, recorded_config

RECORD = "weights.json"
FORMAT = 1

# What a model may have otherwise than the weights it starts from: nothing that decides what it computes in evaluation.
_FREE = {"vocab_size", "dropout", "z_loss", "init_std", "recompute", "kernels"}
_FREE_OF_RESIDUAL = {"save", "output_init", "dyt_attention_alpha", "dyt_alpha"}


class Weights(Protocol):
    """Weights by our global names; :class:`pretrain.checkpoint.weights.StoredWeights` reads those of a checkpoint."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Global name -> whole shape, padding of the vocabulary not counted."""

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU."""


@dataclass(frozen=True)
class InitialWeights:
    """Weights to start from.

    Attributes:
        folder: that holds the tensors.
        model: that they are of, with its scheme's defaults.
        vocab_size: rows of the vocabulary.
        files: what the folder's files must have.
    """

    folder: Path
    model: ModelSettings
    vocab_size: int
    files: Mapping[str, FileFacts]


def write_initial(weights: Weights, model: ModelSettings, vocab_size: int, origin: str, folder: Path) -> None:
    """Write a folder of weights, one tensor at a time.

    Args:
        weights: all of the model's.
        model: their shape.
        vocab_size: rows of the vocabulary.
        origin: where they come from, in words.
        folder: exists and is empty.

    Raises:
        OSError: the disk is full, or gone.
    """
    pieces = (
        Piece(MASTERS + name, tuple(shape), (0,) * len(shape), weights.read(name).to(torch.float32))
        for name, shape in weights.shapes.items()
    )
    written = write_pieces(folder / "__0_0.distcp", pieces)
    files = written.files | write_contents(folder, written.parts)
    record = {
        "format": FORMAT,
        "origin": origin,
        "model": dataclasses.asdict(model),
        "vocab_size": vocab_size,
        "files": {name: dataclasses.asdict(facts) for name, facts in files.items()},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def find_initial(path: Path) -> InitialWeights:
    """The weights in a folder of weights, or those of a checkpoint, or of a run's newest.

    Raises:
        UserError: there are none, or they are damaged or of another version.
    """
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UserError(f"train.init_from={path}: there is no such user; name the folder in full") from None
    if os.path.isfile(path / RECORD):  # pathlib's own raises where a name is too long
        return _read_folder(path)
    try:
        checkpoint = find_checkpoint(path)
    except UserError as error:
        raise UserError(f"train.init_from={path}: {error}") from None
    record = store.read_record(checkpoint)
    model, files = recorded_config(checkpoint, record).model, store.recorded_files(checkpoint)
    return InitialWeights(checkpoint, model, record["vocab_size"], files)


def _read_folder(folder: Path) -> InitialWeights:
    try:
        with open_file(folder / RECORD) as stream:
            record = json.loads(stream.read())
        if record["format"] != FORMAT:
            raise ValueError(f"it has format {record['format']}, but this version reads {FORMAT}")
        files = {name: FileFacts(**facts) for name, facts in record["files"].items()}
        for name, facts in files.items():
            require_size(folder / name, facts.bytes)
        model = TypeAdapter(ModelSettings).validate_python(record["model"])
        return InitialWeights(folder, model, int(record["vocab_size"]), files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"train.init_from={folder}: {RECORD} or a file is damaged ({reason}); import it anew") from None


def check_initial(config: Config, vocab_size: int, initial: InitialWeights) -> None:
    """Refuse to start a model from the weights of another one.

    Raises:
        UserError: with both values.
    """
    where = f"but the weights of train.init_from={config.train.init_from} are those of a model with"
    if vocab_size != initial.vocab_size:
        raise UserError(f"the vocabulary is {vocab_size}, {where} {initial.vocab_size}; set model.vocab_size to that")
    for name, value in _deciding(config.model).items():
        if value != (theirs := _deciding(initial.model).get(name)):
            raise UserError(f"model.{name}={value}, {where} {theirs}; set it to that")


def _deciding(model: ModelSettings) -> dict[str, Any]:
    """The settings that decide what a model computes, or how many weights it has."""
    found = {name: value for name, value in dataclasses.asdict(model).items() if name not in _FREE}
    found["num_query_groups"] = model.num_query_groups or model.num_attention_heads
    if model.output_bias == "unigram":
        found["output_bias"] = "learned"
    if model.positions != "learned":
        del found["sequence_length"]
    if model.positions != "rope":
        del found["rope_base"]
    residual = dataclasses.asdict(with_defaults(model.residual))
    del found["residual"]
    return found | {f"residual.{name}": value for name, value in residual.items() if name not in _FREE_OF_RESIDUAL}


def _misfit(engine: Engine, stored: StoredWeights, vocab_size: int) -> str | None:
    """Why the weights cannot fill this rank's parameters, if so."""
    try:
        for name, parameter in global_names(engine.module).items():
            stored.require(name, whole_shape(name, parameter, vocab_size, engine.shapes[parameter]))
    except DamageError as error:
        return str(error)
    return None


@torch.no_grad()
def load_initial(engine: Engine, initial: InitialWeights) -> None:
    """Fill masters and working weights; the optimizer starts afresh. Each rank reads what it holds, a tensor at a time.

    Collective.

    Raises:
        DamageError: the files are damaged, or hold another model than their record tells.
    """
    if fault := find_damage(initial.folder, initial.files):
        raise DamageError(fault)
    create_adam_state(engine.deepspeed)
    stored = StoredWeights(initial.folder)
    agree(_misfit(engine, stored, initial.vocab_size))
    for name, parameter in global_names(engine.module).items():
        owned = owned_range(parameter)
        if owned is None:
            continue
        start, end = owned
        local = cut_for_this_rank(stored.read(name), parameter, engine.shapes[parameter])
        owned_fragment(parameter, "fp32").copy_(local.reshape(-1)[start:end])
    finish_load(engine.deepspeed, 0)
