"""Weights written to safetensors one tensor at a time, in files of bounded size.

The library's own writer takes all tensors of a file at once, so a file of 5 GB would need 5 GB of memory. The format is
its README's: a header's length (8 bytes, little-endian), a JSON header of names, types, shapes and places, the bytes.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

LARGEST_FILE = 5 * 10**9
"""Bytes of tensors in one file, if not one tensor alone is larger: what transformers writes."""

_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _File:
    name: str
    shapes: dict[str, Shape]


def write_files(
    folder: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    largest: int = LARGEST_FILE,
) -> None:
    """Write ``tensors`` as model.safetensors, or as several files and their index.

    Args:
        folder: receives them.
        shapes: of all tensors, in the order in which they come.
        tensors: (name, values); each is converted, written and forgotten before the next is asked for.
        dtype: of the files, fp32 or bf16.
        largest: bytes of tensors in a file.
    """
    files = _divide(shapes, dtype.itemsize, largest)
    if len(files) > 1:
        _write_index(folder / "model.safetensors.index.json", files, dtype)
    place = {name: file for file in files for name in file.shapes}
    current: _File | None = None
    with ExitStack() as opened:
        stream: BinaryIO | None = None
        for expected, (name, tensor) in zip(shapes, tensors, strict=True):
            if (name, tuple(tensor.shape)) != (expected, shapes[expected]):
                raise ValueError(f"{name} {tuple(tensor.shape)} came where {expected} {shapes[expected]} was announced")
            if place[name] is not current:
                opened.close()
                current = place[name]
                stream = opened.enter_context((folder / current.name).open("wb"))
                stream.write(_header(current.shapes, dtype))
            assert stream is not None
            values = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
            stream.write(values.view(torch.uint8).numpy().data)


def _divide(shapes: Mapping[str, Shape], itemsize: int, largest: int) -> list[_File]:
    parts: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in shapes.items():
        added = itemsize * math.prod(shape)
        if parts[-1] and size + added > largest:
            parts.append({})
            size = 0
        parts[-1][name] = shape
        size += added
    if len(parts) == 1:
        return [_File("model.safetensors", parts[0])]
    return [_File(f"model-{i:05d}-of-{len(parts):05d}.safetensors", part) for i, part in enumerate(parts, start=1)]


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + dtype.itemsize * math.prod(shape)
        content[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write_index(path: Path, files: Sequence[_File], dtype: torch.dtype) -> None:
    count = sum(math.prod(shape) for file in files for shape in file.shapes.values())
    index = {
        "metadata": {"total_parameters": count, "total_size": count * dtype.itemsize},
        "weight_map": {name: file.name for file in files for name in file.shapes},
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
