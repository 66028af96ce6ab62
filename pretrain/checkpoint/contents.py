"""A checkpoint's table of contents and how its tensors are read, without running anything that it holds.

The files are those of Megatron-core's dist_checkpointing (``torch_dist``), which any of its users can read: tensors
as torch.save writes them, one after another in a file of each rank, and ``.metadata``, a pickle. A pickle may call any
function. Here that table may name nothing but the few plain classes that describe tensors, and the tensors are read as
tensors only. Everything that reads a checkpoint's tensors does so by the two ``read_tensors`` functions.
"""

import io
import json
import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from pretrain.checkpoint.files import DamageError, FileFacts, new_file, open_file

CONTENTS = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_HARMLESS = {
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
}


@dataclass(frozen=True)
class Part:
    """A part of a global fp32 tensor, and where it was written.

    Attributes:
        key: name of the global tensor.
        global_shape: of the whole tensor.
        offset, size: of the part, per axis.
        file: name of its file.
        start, length: its bytes in the file.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


class _PlainUnpickler(pickle.Unpickler):
    """Refuses whatever is not the description of a tensor in a file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            if (module, name) == ("builtins", "getattr"):
                return _memory_format
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


def _memory_format(owner: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """What stands for getattr: Python before 3.11.4, Debian 12's for one, pickles an enum's member by it."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr, which is no part of a checkpoint")
    return _MEM_FORMAT_ENCODING[name]


class PlainReader(FileSystemReader):
    """Torch's reader, which loads tensors with ``weights_only``, with one harmless look at the table of contents."""

    @cached_property
    def _contents(self) -> Metadata:
        metadata = read_contents(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        """Torch's hook."""
        return self._contents


def write_contents(folder: Path, parts: Sequence[Part]) -> dict[str, FileFacts]:
    """Write what dist_checkpointing keeps beside the tensors: the table of contents, and two files that say nothing.

    Returns:
        The files' names and facts.

    Raises:
        OSError: the disk is full, or gone.
    """
    common = io.BytesIO()
    torch.save({}, common)
    version = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    contents = {
        CONTENTS: pickle.dumps(_described(parts)),
        "common.pt": common.getvalue(),
        "metadata.json": json.dumps(version | {"common_backend_version": 1}).encode(),
    }
    facts = {}
    for name, content in contents.items():
        with new_file(folder / name) as file:
            file.write(content)
        facts[name] = file.facts
    return facts


def _described(parts: Sequence[Part]) -> Metadata:
    chunks = defaultdict[tuple[str, tuple[int, ...]], list[Part]](list)
    for part in parts:
        chunks[part.key, part.global_shape].append(part)
    tensors = {}
    for (key, global_shape), found in chunks.items():
        boxes = [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.size)) for part in found]
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(global_shape), boxes)
        fault = _fault_of(tensors[key])
        assert fault is None, f"{key} {fault}"
    places = {
        MetadataIndex(part.key, torch.Size(part.offset)): _StorageInfo(part.file, part.start, part.length)
        for part in parts
    }
    assert len(places) == len(parts), "a part was written twice"
    return Metadata(dict(tensors), storage_data=places)


def read_contents(checkpoint: Path) -> Metadata:
    """The table of contents: plain, of whole fp32 tensors, and all files that it names lie in the checkpoint's folder.

    Raises:
        DamageError: it is not.
    """
    try:
        with open_file(checkpoint / CONTENTS) as stream:
            metadata = _checked(stream)
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            open_file(checkpoint / name).close()
        return metadata
    except Exception as error:  # a broken pickle may raise anything
        raise DamageError(f"{checkpoint / CONTENTS} is damaged or not from this program: {error}") from None


def read_tensors(state: dict[str, Any], checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of ``state`` in place; collective over ``group``, by default all ranks.

    Takes memory for one stored part of a tensor.

    Args:
        state: name -> fp32 tensor, or torch's own and Megatron-core's descriptions of a tensor's local parts.

    Raises:
        DamageError: on all ranks, when a tensor cannot be read on any.
    """
    with _damage_named(checkpoint):
        load(state, storage_reader=PlainReader(checkpoint), process_group=group)


def read_tensors_alone(state: dict[str, Any], reader: PlainReader) -> None:
    """As :func:`read_tensors`, for one process whether or not there are others."""
    with _damage_named(Path(reader.path)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is meant
        load(state, storage_reader=reader, no_dist=True)


@contextmanager
def _damage_named(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        # Torch's own words advise to read the file in the way that runs what it holds.
        reasons = ", ".join(sorted({type(reason).__name__ for reason, _ in error.failures.values()}))
        raise DamageError(f"{checkpoint} is damaged: its tensors cannot be read ({reasons})") from None


def shapes(metadata: Metadata) -> Mapping[str, torch.Size]:
    """Name -> shape of all tensors in a checkpoint."""
    tensors = metadata.state_dict_metadata.items()
    return {key: tensor.size for key, tensor in tensors if isinstance(tensor, TensorStorageMetadata)}


def _checked(stream: BinaryIO) -> Metadata:
    metadata = _PlainUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("it is no table of contents")
    for key, tensor in metadata.state_dict_metadata.items():
        if fault := _fault_of(tensor):
            raise ValueError(f"{key} {fault}")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{place.relative_path} lies outside the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{place.relative_path} is not stored plainly")
    return metadata


def _fault_of(tensor: Any) -> str | None:
    if not isinstance(tensor, TensorStorageMetadata) or tensor.properties.dtype != torch.float32:
        return "is no fp32 tensor"
    if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
        return "is not whole"
    return None
