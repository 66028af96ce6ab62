"""Optimizer state as pieces of global tensors, without gathering.

ZeRO gives each data-parallel rank a flat range of each local parameter, at stage 0 all of it. Such a range of a
row-major tensor is a few axis-aligned boxes; each box becomes a ShardedTensor, so dist_checkpointing can load it in any
other layout and at any other stage.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from pretrain.deepspeed_compat import ADAM_MOMENTS, owned_fragment, owned_range
from pretrain.engine import Engine


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: ``size`` per axis from ``offset``; ``start`` is its first flat index."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Boxes that cover the flat range [start, end) of a row-major tensor, in flat order and without overlap."""
    if start >= end:
        return []
    if len(shape) == 1:
        return [Box((start,), (end - start,), start)]
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row), end // row
    if first_whole > last_whole:  # inside one row
        return _boxes_in_row(shape, start // row, start, end)
    found = []
    if start % row:
        found += _boxes_in_row(shape, start // row, start, first_whole * row)
    if first_whole < last_whole:
        offset = (first_whole,) + (0,) * (len(shape) - 1)
        found.append(Box(offset, (last_whole - first_whole, *shape[1:]), first_whole * row))
    if end % row:
        found += _boxes_in_row(shape, last_whole, last_whole * row, end)
    return found


def sharded_state(engine: Engine, vocab_size: int, saving: bool) -> dict[str, Any]:
    """ShardedTensors over the fp32 masters and Adam moments that this rank owns, as views: a load fills them in place.

    Args:
        vocab_size: rows of the vocabulary; padding rows, which depend on tp, stay out of the checkpoint.
        saving: leave out what another rank writes: parameters replicated over tp, the second copy of a tied embedding
            and, where ZeRO divides nothing, data-parallel copies have one writer, but every holder loads them.
    """
    state: dict[str, Any] = {}
    for index, (parameter, pieces) in enumerate(engine.templates.items()):
        owned = owned_range(parameter)
        if owned is None or (saving and not engine.writes(parameter)):
            continue
        for name in ("fp32", *ADAM_MOMENTS):
            fragment = owned_fragment(parameter, name)
            for part, sharded in enumerate(_shards(pieces, name, fragment, owned, vocab_size)):
                state[f"{name}.{index}.{part}"] = sharded
    return state


def _shards(
    pieces: Sequence[ShardedTensor],
    name: str,
    fragment: torch.Tensor,
    owned: tuple[int, int],
    vocab_size: int,
) -> Iterator[ShardedTensor]:
    """The pieces of one parameter's ``fragment``; ``pieces`` are those of the whole parameter, one behind another."""
    start, end = owned
    position = 0
    for piece in pieces:
        numel = math.prod(piece.local_shape)
        low, high = max(start, position), min(end, position + numel)
        if low < high:
            flat = fragment[low - start : high - start]
            yield from _piece_shards(piece, f"{name}.{piece.key}", flat, low - position, high - position, vocab_size)
        position += numel


def _piece_shards(
    piece: ShardedTensor, key: str, flat: torch.Tensor, start: int, end: int, vocab_size: int
) -> Iterator[ShardedTensor]:
    global_shape = list(piece.global_shape)
    rows = global_shape[0]
    if _is_vocabulary(piece.key):
        rows = global_shape[0] = vocab_size
    for box in boxes(tuple(piece.local_shape), start, end):
        offset = [base + inner for base, inner in zip(piece.global_offset, box.offset, strict=True)]
        kept = max(0, min(box.size[0], rows - offset[0]))
        if not kept:
            continue
        size = (kept, *box.size[1:])
        data = flat[box.start - start :][: math.prod(size)].view(size)
        yield ShardedTensor(
            key,
            data,
            data.dtype,
            size,
            tuple(global_shape),
            tuple(offset),
            None,  # axis_fragmentations: the boxes form no regular grid
            replica_id=0,
        )


def _is_vocabulary(key: str) -> bool:
    return key.startswith(("embedding.word_embeddings.", "output_layer."))


def _boxes_in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> list[Box]:
    base = row * math.prod(shape[1:])
    return [
        Box((row, *box.offset), (1, *box.size), box.start + base) for box in boxes(shape[1:], start - base, end - base)
    ]
