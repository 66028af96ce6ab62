"""Watching the states of the residual stream: how far each sublayer turns them, and how much they agree."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.residual import SUBLAYERS, Residual
from megatron_ext.retraction import compute_dtype


@dataclass(frozen=True)
class Geometry:
    """Means over the tokens of all recorded forward passes, on the CPU in fp64.

    Attributes:
        mean_angle: [num_layers, 2], radians in [0, pi]: the turn of the state by attention and by the MLP.
        resultant_length: [num_layers]: |mean of x/|x|| of the states entering a layer; 0 spread evenly, 1 all alike.
    """

    mean_angle: Tensor
    resultant_length: Tensor


class GeometryProbe:
    """Measures the residual stream of one pipeline stage, for every scheme.

    Nothing is recorded, and no layer does any extra work, outside :meth:`recording`. A recomputed forward pass counts
    twice with the same values, and so do the copies of a token on several tensor-parallel ranks: means stay the same.
    Angles below the precision of the stream's storage type (about 2e-3 rad for bf16) are rounding.

    Args:
        model: a stage whose layers come from :func:`megatron_ext.residual_block_spec`.

    Raises:
        ValueError: the model has no such layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.residuals = [module for module in model.modules() if isinstance(module, Residual)]
        if not self.residuals:
            raise ValueError("the model has no layer that can be observed; build it from residual_block_spec")
        config: Any = model.config
        self.shape: tuple[int, int] = (config.num_layers, config.hidden_size)
        self._sums: Tensor | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward passes within; earlier records are forgotten."""
        self._sums = None
        for residual in self.residuals:
            residual.observer = self._observe
        try:
            yield
        finally:
            for residual in self.residuals:
                residual.observer = None

    @torch.no_grad()
    def _observe(self, residual: Residual, state: Tensor, increment: Tensor, new_state: Tensor) -> None:
        x, y = _unit(state), _unit(new_state)
        sums = self._sums_on(x.device)[residual.layer_number - 1]
        sums[residual.position] += _angle_between_units(x, y).sum(dtype=torch.float64)
        if residual.position == 0:
            sums[len(SUBLAYERS)] += x.numel() // x.shape[-1]
            sums[len(SUBLAYERS) + 1 :] += x.flatten(0, -2).sum(0, dtype=torch.float64)

    def _sums_on(self, device: torch.device) -> Tensor:
        """[num_layers, angle sums | tokens | sum of unit states]."""
        if self._sums is None:
            num_layers, hidden_size = self.shape
            self._sums = torch.zeros(num_layers, len(SUBLAYERS) + 1 + hidden_size, dtype=torch.float64, device=device)
        return self._sums

    def reduce(self, group: dist.ProcessGroup | None = None) -> Geometry:
        """Means over all ranks of `group` (None: all of them); every rank of it must call and gets the same.

        Raises:
            ValueError: nothing was recorded on this rank.
        """
        if self._sums is None:
            raise ValueError("nothing was recorded: run a forward pass inside recording()")
        sums = self._sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums, group=group)
        sums = sums.cpu()
        tokens = sums[:, len(SUBLAYERS)]
        return Geometry(
            mean_angle=sums[:, : len(SUBLAYERS)] / tokens[:, None],
            resultant_length=sums[:, len(SUBLAYERS) + 1 :].norm(dim=-1) / tokens,
        )


def _unit(state: Tensor) -> Tensor:
    return nn.functional.normalize(state.to(compute_dtype(state)), dim=-1)


def _angle_between_units(a: Tensor, b: Tensor) -> Tensor:
    """Angle in radians between rows of norm 1 (Kahan): unlike acos of the inner product accurate for small angles."""
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
