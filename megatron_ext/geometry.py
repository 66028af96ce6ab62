"""Watching the residual stream: how far and how each sublayer moves the states, and how much they agree."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.kernels.eager import compute_dtype
from megatron_ext.residual import SUBLAYERS, Residual
from megatron_ext.retraction import tangent


@dataclass(frozen=True)
class Geometry:
    """What every sublayer did to the residual stream, over the tokens of all recorded forward passes.

    A sublayer takes a state x (norm r) to a new state y by adding an increment u with a step size alpha; what u and
    alpha are is the scheme's (see `Residual.increment` and `Residual.step_size`). v = u - (<x, u> / r^2) x is u's
    tangent part. All tensors are fp64 on the CPU, [num_layers, 2] for (attention, MLP) or [num_layers].

    Attributes:
        mean_angle: [num_layers, 2], radians in [0, pi]: the angle between x and y, mean over tokens.
        largest_angle: [num_layers, 2], the same, its maximum over tokens.
        beta: [num_layers, 2], dimensionless: the normalised step alpha |v| / r, mean over tokens; 0 for x = 0.
        radial_share: [num_layers, 2] in [0, 1]: the share <x, u>^2 / (|x|^2 |u|^2) of the increment's squared length
            that lies along the state, mean over tokens; 0 for x = 0 or u = 0. A random direction has 1 / hidden_size.
        step_size: [num_layers, 2], dimensionless: alpha; for `ngpt_lerp` its mean over the channels.
        clamped_share: [num_layers, 2] in [0, 1]: the share of tokens whose angle was cut off by the clamp.
        radius: [num_layers]: the norm of the states entering a layer, mean over tokens.
        radius_drift: [num_layers], dimensionless: radius over the first layer's, minus 1.
        largest_radius_drift: [num_layers], dimensionless: the largest |r / R - 1| over the tokens' norms r entering a
            layer, with R the first layer's radius.
        resultant_length: [num_layers] in [0, 1]: |mean of x / r| over the states entering a layer; 0 spread evenly, 1
            all alike.
    """

    mean_angle: Tensor
    largest_angle: Tensor
    beta: Tensor
    radial_share: Tensor
    step_size: Tensor
    clamped_share: Tensor
    radius: Tensor
    radius_drift: Tensor
    largest_radius_drift: Tensor
    resultant_length: Tensor


class GeometryProbe:
    """Measures the residual stream of one pipeline stage, for every scheme.

    Nothing is recorded, and no layer does any extra work, outside :meth:`recording`; within, everything stays on the
    device until :meth:`reduce`. A recomputed forward pass counts twice with the same values, and so do the copies of a
    token on several tensor-parallel ranks: means stay the same. Angles below the precision of the stream's storage type
    (about 2e-3 rad for bf16) are rounding.

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
        self._totals: _Totals | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward passes within; earlier records are forgotten."""
        self._totals = None
        for residual in self.residuals:
            residual.observer = self._observe
        try:
            yield
        finally:
            for residual in self.residuals:
                residual.observer = None

    @torch.no_grad()
    def _observe(self, residual: Residual, state: Tensor, increment: Tensor, new_state: Tensor) -> None:
        if self._totals is None:
            self._totals = _Totals.zero(*self.shape, state.device)
        layer, totals = residual.layer_number - 1, self._totals
        x, u, y = (tensor.to(compute_dtype(state)) for tensor in (state, increment, new_state))
        norm, direction = x.norm(dim=-1), _unit(x)
        angle = _angle_between_units(direction, _unit(y))
        step_size = residual.step_size()
        beta = step_size * _ratio(tangent(x, u).norm(dim=-1), norm)
        radial_share = (direction * _unit(u)).sum(-1).square()
        alpha = torch.zeros_like(beta) + step_size
        means = torch.stack([angle, beta, radial_share, alpha, residual.share_clamped(beta)])
        totals.of_sublayers[layer, residual.position] += means.flatten(1).sum(1, dtype=torch.float64)
        _raise_to(totals.largest_angle[layer, residual.position], angle.max())
        if residual.position == 0:
            totals.tokens[layer] += norm.numel()
            totals.norms[layer] += norm.sum(dtype=torch.float64)
            totals.directions[layer] += direction.flatten(0, -2).sum(0, dtype=torch.float64)
            _raise_to(totals.norm_range[layer], torch.stack([norm.max(), -norm.min()]))

    def reduce(self, group: dist.ProcessGroup | None = None) -> Geometry:
        """Means and maxima over all ranks of `group` (None: all of them); every rank must call and gets the same.

        Raises:
            ValueError: nothing was recorded on this rank.
        """
        if self._totals is None:
            raise ValueError("nothing was recorded: run a forward pass inside recording()")
        totals = self._totals.over_ranks(group)
        of_sublayers = totals.of_sublayers / totals.tokens[:, None, None]
        mean_angle, beta, radial_share, step_size, clamped_share = of_sublayers.unbind(-1)
        radius = totals.norms / totals.tokens
        highest, lowest = totals.norm_range[:, 0], -totals.norm_range[:, 1]
        return Geometry(
            mean_angle=mean_angle,
            largest_angle=totals.largest_angle,
            beta=beta,
            radial_share=radial_share,
            step_size=step_size,
            clamped_share=clamped_share,
            radius=radius,
            radius_drift=radius / radius[0] - 1,
            largest_radius_drift=torch.maximum(highest / radius[0] - 1, 1 - lowest / radius[0]),
            resultant_length=totals.directions.norm(dim=-1) / totals.tokens,
        )


@dataclass(frozen=True)
class _Totals:
    """Sums and maxima over tokens, fp64, of all layers: rows of other stages' layers stay at their start.

    Attributes:
        of_sublayers: [num_layers, 2, 5] sums: angle, beta, radial share, step size, 1 where clamped.
        tokens, norms: [num_layers] sums over the states entering a layer.
        directions: [num_layers, hidden] sum of the states' directions.
        largest_angle: [num_layers, 2] maxima.
        norm_range: [num_layers, 2] maxima of the norm and of its negative.
    """

    of_sublayers: Tensor
    tokens: Tensor
    norms: Tensor
    directions: Tensor
    largest_angle: Tensor
    norm_range: Tensor

    @classmethod
    def zero(cls, num_layers: int, hidden_size: int, device: torch.device) -> "_Totals":
        """Before the first token."""

        def full(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full((num_layers, *shape), value, dtype=torch.float64, device=device)

        sublayers = len(SUBLAYERS)
        return cls(full(sublayers, 5), full(), full(), full(hidden_size), full(sublayers), full(2, value=-float("inf")))

    def over_ranks(self, group: dist.ProcessGroup | None) -> "_Totals":
        """The totals of all ranks of `group` together, on the CPU."""
        sums = (self.of_sublayers, self.tokens, self.norms, self.directions)
        maxima = (self.largest_angle, self.norm_range)
        return _Totals(*_all_reduce(sums, dist.ReduceOp.SUM, group), *_all_reduce(maxima, dist.ReduceOp.MAX, group))


def _all_reduce(tensors: Sequence[Tensor], operation: Any, group: dist.ProcessGroup | None) -> list[Tensor]:
    """One reduction for all of them; the results lie on the CPU."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if dist.is_initialized():
        dist.all_reduce(flat, op=operation, group=group)
    parts = torch.split(flat.cpu(), [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _raise_to(maximum: Tensor, value: Tensor) -> None:
    torch.maximum(maximum, value.to(maximum.dtype), out=maximum)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Element by element; 0 where the denominator is."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def _unit(state: Tensor) -> Tensor:
    return nn.functional.normalize(state, dim=-1)


def _angle_between_units(a: Tensor, b: Tensor) -> Tensor:
    """Angle in radians between rows of norm 1 (Kahan): unlike acos of the inner product accurate for small angles."""
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
