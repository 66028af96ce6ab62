"""Start a run from weights that are there: a folder of weights alone, or the weights of any checkpoint.

A folder of weights holds fp32 tensors as a checkpoint does, without optimizer state, and ``weights.json``.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ext import ModelSettings, with_defaults
from megatron_ext.initialize import cut_for_this_rank, global_names
from pretrain.checkpoint import store
from pretrain.checkpoint.weights import MASTERS, StoredWeights, without_peers
from pretrain.config import Config
from pretrain.deepspeed_compat import create_adam_state, finish_load, owned_fragment, owned_range
from pretrain.engine import Engine
from pretrain.errors import UserError
from pretrain.inspect_checkpoint import find_checkpoint, recorded_config

RECORD = "weights.json"
FORMAT = 1

# What a model may have otherwise than the weights it starts from: nothing that decides what it computes in evaluation.
_FREE = {"vocab_size", "dropout", "z_loss", "init_std", "recompute"}
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
    """

    folder: Path
    model: ModelSettings
    vocab_size: int


def write_initial(weights: Weights, model: ModelSettings, vocab_size: int, origin: str, folder: Path) -> None:
    """Write a folder of weights, one tensor at a time.

    Args:
        weights: all of the model's.
        model: their shape.
        vocab_size: rows of the vocabulary.
        origin: where they come from, in words.
        folder: exists and is empty.
    """
    announced = {MASTERS + name: torch.empty(tuple(shape), device="meta") for name, shape in weights.shapes.items()}
    writer = _PlainWriter(folder, single_file_per_rank=True)
    try:
        with without_peers():
            save(announced, storage_writer=writer, planner=_OneByOne(weights), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise cause from None  # what reading or writing a tensor raised
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    record = {
        "format": FORMAT,
        "origin": origin,
        "model": dataclasses.asdict(model),
        "vocab_size": vocab_size,
        "files": files,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


class _OneByOne(DefaultSavePlanner):
    """Gets each tensor only when it is written."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights = weights

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Torch's hook: the values of an announced tensor."""
        return self._weights.read(index.fqn.removeprefix(MASTERS)).to(torch.float32)


class _PlainWriter(FileSystemWriter):
    """Leaves out of the table of contents what does not describe a tensor."""

    def storage_meta(self) -> None:
        """Torch's hook."""
        return


def find_initial(path: Path) -> InitialWeights:
    """The weights in a folder of weights, or those of a checkpoint, or of a run's newest.

    Raises:
        UserError: there are none, or they are damaged or of another version.
    """
    path = path.expanduser()
    if (path / RECORD).is_file():
        return _read_folder(path)
    try:
        checkpoint = find_checkpoint(path)
    except UserError as error:
        raise UserError(f"train.init_from={path}: {error}") from None
    record = store.read_record(checkpoint)
    return InitialWeights(checkpoint, recorded_config(checkpoint, record).model, record["vocab_size"])


def _read_folder(folder: Path) -> InitialWeights:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"it has format {record['format']}, but this version reads {FORMAT}")
        for name, size in record["files"].items():
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} bytes instead of {size}")
        return InitialWeights(
            folder, TypeAdapter(ModelSettings).validate_python(record["model"]), int(record["vocab_size"])
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ValidationError) as error:
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


@torch.no_grad()
def load_initial(engine: Engine, initial: InitialWeights) -> None:
    """Fill masters and working weights; the optimizer starts afresh. Each rank reads what it holds, a tensor at a time.

    Raises:
        UserError: the files are damaged.
    """
    create_adam_state(engine.deepspeed)
    stored = StoredWeights(initial.folder)
    for name, parameter in global_names(engine.module).items():
        owned = owned_range(parameter)
        if owned is None:
            continue
        start, end = owned
        local = cut_for_this_rank(stored.read(name), parameter)
        owned_fragment(parameter, "fp32").copy_(local.reshape(-1)[start:end])
    finish_load(engine.deepspeed, 0)
