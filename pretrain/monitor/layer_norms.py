"""Norms of gradient, weights and update for each layer, of what each rank owns, without gathering."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.initialize import global_names
from pretrain.deepspeed_compat import owned_fragment, owned_gradient, owned_range
from pretrain.engine import Engine
from pretrain.monitor.tags import PARTS, layer_tag

_LAYER = "decoder.layers."
_EMBEDDING = "embedding."
QUANTITIES = ("norm", "parameter_norm", "update_ratio")
"""Of the group gradients, in the order of the columns of :meth:`LayerNorms.reduce`."""


@dataclass(frozen=True)
class _Piece:
    """A parameter of which this rank owns a part that it answers for, and the row that it counts in."""

    row: int
    parameter: torch.nn.Parameter


class LayerNorms:
    """Measures one update: gradients and weights before it, and how far it went.

    Rows are the model's layers, then :data:`pretrain.monitor.tags.PARTS`. Of a parameter that several ranks hold one
    counts it. While an update is recorded its fp32 weights are held twice.
    """

    def __init__(self, engine: Engine, num_layers: int) -> None:
        self._engine = engine
        self._num_layers = num_layers
        self._squares: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the update, when the gradients are reduced and not yet clipped."""
        pieces = _pieces(self._engine, self._num_layers)
        with torch.no_grad():
            weights = [owned_fragment(piece.parameter, "fp32") for piece in pieces]
            gradients = _norms([owned_gradient(piece.parameter) for piece in pieces])
            sizes = _norms(weights)
            before = [weight.clone() for weight in weights]
        yield
        with torch.no_grad():
            if pieces:
                torch._foreach_sub_(before, weights)  # one kernel for many small tensors
            columns = torch.stack([gradients, sizes, _norms(before)], dim=1) if pieces else None
        self._squares = torch.zeros(self._num_layers + len(PARTS), 3, dtype=torch.float64, device=self._device)
        if columns is not None:
            rows = torch.tensor([piece.row for piece in pieces], device=self._device)
            self._squares.index_add_(0, rows, columns.double().square())

    def reduce(self) -> Tensor:
        """Of all ranks together: fp64 ``[layers + 2, 3]`` on the CPU, columns as :data:`QUANTITIES`; collective.

        The norms are those of the undivided model; the ratio is 0 where there are no weights.
        """
        assert self._squares is not None, "no update was recorded"
        dist.all_reduce(self._squares)
        gradient, size, update = self._squares.sqrt().cpu().unbind(1)
        self._squares = None
        return torch.stack([gradient, size, torch.where(size > 0, update / size, 0.0)], dim=1)

    @property
    def _device(self) -> torch.device:
        return self._engine.place.device


def gradient_norms(engine: Engine, num_layers: int) -> list[float]:
    """Norm of the reduced gradient of each layer, then of :data:`pretrain.monitor.tags.PARTS`; collective.

    The same in every layout.
    """
    squares = torch.zeros(num_layers + len(PARTS), dtype=torch.float64, device=engine.place.device)
    for piece in _pieces(engine, num_layers):
        squares[piece.row] += owned_gradient(piece.parameter).double().square().sum()
    dist.all_reduce(squares)
    norms: list[float] = squares.sqrt().tolist()
    return norms


def _pieces(engine: Engine, num_layers: int) -> list[_Piece]:
    """In every step anew: what a rank owns may change with a load."""
    return [
        _Piece(_row(name, num_layers), parameter)
        for name, parameter in global_names(engine.module).items()
        if owned_range(parameter) is not None and engine.writes(parameter)
    ]


def _row(name: str, num_layers: int) -> int:
    if name.startswith(_LAYER):
        return int(name.removeprefix(_LAYER).split(".", 1)[0])
    return num_layers + int(not name.startswith(_EMBEDDING))


def norm_values(norms: Tensor) -> dict[str, float]:
    """Tag -> value of what :meth:`LayerNorms.reduce` gave."""
    layers = len(norms) - len(PARTS)
    values: dict[str, float] = {}
    for quantity, column in zip(QUANTITIES, norms.T.tolist(), strict=True):
        name = f"gradients/{quantity}"
        tags = [layer_tag(name, layer) for layer in range(1, layers + 1)] + [f"{name}/{part}" for part in PARTS]
        values |= dict(zip(tags, column, strict=True))
    return values


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norm of each, fp32 ``[n]``."""
    return torch.stack(torch._foreach_norm(list(tensors))) if tensors else torch.zeros(0)
