"""The weights of a checkpoint alone, on one process, without an engine and without running anything it holds.

torch.distributed.checkpoint keeps its table of contents as a pickle, and a pickle may call any function. Here that
table may name nothing but the few plain classes that describe tensors, and the tensors are read as tensors only.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.initialize import EMBEDDING, OUTPUT_BIAS, OUTPUT_WEIGHT, global_names
from pretrain.errors import UserError

MASTERS = "fp32."
"""The names of the fp32 weights in a checkpoint begin with this."""
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_HARMLESS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
}


class _PlainUnpickler(pickle.Unpickler):
    """Refuses whatever is not the description of a tensor in a file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


class _PlainReader(FileSystemReader):
    """Torch's reader with a harmless look at the table of contents."""

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        metadata = _contents(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _RememberingReader(_PlainReader):
    """Looks at the table of contents once."""

    @cached_property
    def _contents(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        return self._contents


def count_parameters(checkpoint: Path) -> int:
    """Parameters in a checkpoint, padding of the vocabulary not counted.

    Raises:
        UserError: the checkpoint is damaged or not one of ours.
    """
    return sum(shape.numel() for shape in _masters(checkpoint).values())


@contextmanager
def without_peers() -> Iterator[None]:
    """Torch warns of ``no_dist=True``, which is meant: one process reads or writes alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


class StoredWeights:
    """The fp32 masters of a checkpoint of any layout, read one tensor at a time by any process, alone.

    Attributes:
        shapes: global name -> whole shape, padding of the vocabulary not counted.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Read the table of contents; UserError when it is damaged or not one of ours."""
        self.checkpoint = checkpoint
        self.shapes: Mapping[str, torch.Size] = _masters(checkpoint)
        self._reader = _RememberingReader(checkpoint)

    def read(self, name: str) -> Tensor:
        """One whole tensor, fp32 on the CPU.

        Raises:
            UserError: the checkpoint is damaged.
        """
        wanted = {MASTERS + name: torch.empty(self.shapes[name], dtype=torch.float32)}
        try:
            with without_peers():
                load(wanted, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            # Torch's own words advise to read the file in the way that runs what it holds.
            reasons = ", ".join(type(reason).__name__ for reason, _ in error.failures.values())
            raise UserError(f"{self.checkpoint} is damaged: its tensors cannot be read ({reasons})") from None
        return wanted[MASTERS + name]

    def require(self, name: str, shape: Sequence[int]) -> None:
        """UserError unless there is a tensor of that name and shape."""
        if self.shapes.get(name) != torch.Size(shape):
            found = tuple(self.shapes[name]) if name in self.shapes else "missing"
            raise UserError(
                f"{self.checkpoint} does not fit its own record: {name} is {found} instead of {tuple(shape)}"
            )


@torch.no_grad()
def load_weights(module: nn.Module, checkpoint: Path, vocab_size: int) -> None:
    """Fill every parameter of a whole model from the fp32 masters of a checkpoint of any layout.

    Args:
        module: what :func:`megatron_ext.build_model` gives; any floating type, any device.
        checkpoint: its folder.
        vocab_size: rows of the vocabulary in the checkpoint; rows of padding are zero.

    Raises:
        UserError: the checkpoint is damaged, or holds another model.
    """
    stored = StoredWeights(checkpoint)
    parameters = global_names(module)
    for name, parameter in parameters.items():
        rows = vocab_size if name in (EMBEDDING, OUTPUT_WEIGHT, OUTPUT_BIAS) else parameter.shape[0]
        stored.require(name, (rows, *parameter.shape[1:]))
    for name, parameter in parameters.items():
        master = stored.read(name)
        parameter.zero_()
        parameter[: len(master)].copy_(master)


def _masters(checkpoint: Path) -> dict[str, torch.Size]:
    """Global name -> shape of the stored fp32 weights; all of them are whole."""
    shapes = {}
    for key, tensor in _contents(checkpoint).state_dict_metadata.items():
        if not key.startswith(MASTERS):
            continue
        if not isinstance(tensor, TensorStorageMetadata):
            raise UserError(f"{checkpoint} is damaged: {key} is no tensor")
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise UserError(f"{checkpoint} is damaged: {key} is not whole")
        shapes[key.removeprefix(MASTERS)] = tensor.size
    return shapes


def _contents(checkpoint: Path) -> Metadata:
    """The table of contents; it must be plain, and all files it names must lie in the checkpoint's folder."""
    try:
        with (checkpoint / ".metadata").open("rb") as stream:
            return _checked(stream)
    except Exception as error:  # a broken pickle may raise anything
        raise UserError(f"{checkpoint / '.metadata'} is damaged or not from this program: {error}") from None


def _checked(stream: BinaryIO) -> Metadata:
    metadata = _PlainUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("it is no table of contents")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{place.relative_path} lies outside the checkpoint")
    return metadata
