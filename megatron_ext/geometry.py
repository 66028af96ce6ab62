"""Watching the residual stream: how far and how each sublayer moves the states, and how much they agree."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_ext.attention import ScaledDotProductAttention, largest_logit
from megatron_ext.context import DocumentRuns
from megatron_ext.documents import Documents
from megatron_ext.kernels.eager import compute_dtype
from megatron_ext.residual import SUBLAYERS, Residual


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
        largest_activation: [num_layers]: the largest absolute element of the states leaving a layer.
        largest_attention_logit: [num_layers]: the largest scaled query-key product before the softmax, over all heads,
            in the first sample of the first recorded pass; -inf where the attention is not this package's.
        largest_logit: scalar: the largest output logit over tokens and vocabulary.
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
    largest_activation: Tensor
    largest_attention_logit: Tensor
    largest_logit: Tensor


class GeometryProbe:
    """Measures the residual stream of one pipeline stage, for every scheme.

    Nothing is recorded, and no layer does any extra work, outside :meth:`recording`; within, everything stays on the
    device until :meth:`reduce`. A recomputed forward pass counts twice with the same values, and so do the copies of a
    token on several tensor-parallel ranks: means stay the same. Angles below the precision of the stream's storage type
    (about 2e-3 rad for bf16) are rounding.

    Args:
        model: a stage whose layers come from :func:`megatron_ext.residual_block_spec`, or an nn.ModuleList of several.

    Raises:
        ValueError: the model has no such layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.residuals = [module for module in model.modules() if isinstance(module, Residual)]
        if not self.residuals:
            raise ValueError("the model has no layer that can be observed; build it from residual_block_spec")
        self._attentions = [module for module in model.modules() if isinstance(module, ScaledDotProductAttention)]
        chunks: Any = model if isinstance(model, nn.ModuleList) else [model]
        last = chunks[-1]
        self._output: Any = getattr(last, "output_layer", None) if getattr(last, "post_process", False) else None
        config: Any = last.config
        self.device = next(model.parameters()).device
        self.shape: tuple[int, int] = (config.num_layers, config.hidden_size)
        self._totals: _Totals | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward passes within; earlier records are forgotten."""
        self._totals = None
        self._attended: set[int] = set()
        for residual in self.residuals:
            residual.observer = self._observe
        if parallel_state.get_data_parallel_rank() == 0:
            for attention in self._attentions:
                attention.observer = self._observe_attention
        hook = self._output.register_forward_hook(self._observe_logits) if self._output is not None else None
        try:
            yield
        finally:
            for residual in self.residuals:
                residual.observer = None
            for attention in self._attentions:
                attention.observer = None
            if hook is not None:
                hook.remove()

    @property
    def _of_pass(self) -> "_Totals":
        if self._totals is None:
            self._totals = _Totals.zero(*self.shape, self.device)
        return self._totals

    @torch.no_grad()
    def _observe_attention(
        self, attention: Any, query: Tensor, key: Tensor, documents: Documents | DocumentRuns | None
    ) -> None:
        layer = attention.layer_number - 1
        if layer not in self._attended:  # the first sample is the same in every layout
            self._attended.add(layer)
            places = attention.places_in(key.shape[0], query.device)
            position_ids = places if documents is None else documents.position_ids[0]
            largest = largest_logit(query, key, places, position_ids, attention.softmax_scale)
            _raise_to(self._of_pass.attention_logit[layer], largest)

    @torch.no_grad()
    def _observe_logits(self, module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> None:
        _raise_to(self._of_pass.logit, output[0].max())

    @torch.no_grad()
    def _observe(self, residual: Residual, state: Tensor, increment: Tensor, new_state: Tensor) -> None:
        layer, totals = residual.layer_number - 1, self._of_pass
        x, u, y = (tensor.to(compute_dtype(state)) for tensor in (state, increment, new_state))
        norm = x.norm(dim=-1)
        along, across = _split(x, norm, u)
        angle = torch.atan2(*reversed(_split(x, norm, y)))  # unlike acos accurate for small angles
        step_size = residual.step_size()
        beta = step_size * _ratio(across, norm)
        radial_share = _ratio(along.square(), along.square() + across.square())
        alpha = torch.zeros_like(beta) + step_size
        means = torch.stack([angle, beta, radial_share, alpha, residual.share_clamped(beta)])
        totals.of_sublayers[layer, residual.position] += means.flatten(1).sum(1, dtype=torch.float64)
        _raise_to(totals.largest_angle[layer, residual.position], angle.max())
        if residual.position == 0:
            totals.tokens[layer] += norm.numel()
            totals.norms[layer] += norm.sum(dtype=torch.float64)
            direction = x * _ratio(torch.ones_like(norm), norm).unsqueeze(-1)
            totals.directions[layer] += direction.flatten(0, -2).sum(0, dtype=torch.float64)
            _raise_to(totals.norm_range[layer], torch.stack([norm.max(), -norm.min()]))
        else:
            lowest, highest = y.aminmax()
            _raise_to(totals.activation[layer], torch.maximum(highest, -lowest))

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
            largest_activation=totals.activation,
            largest_attention_logit=totals.attention_logit,
            largest_logit=totals.logit,
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
        activation, attention_logit: [num_layers] maxima.
        logit: scalar maximum.
    """

    of_sublayers: Tensor
    tokens: Tensor
    norms: Tensor
    directions: Tensor
    largest_angle: Tensor
    norm_range: Tensor
    activation: Tensor
    attention_logit: Tensor
    logit: Tensor

    @classmethod
    def zero(cls, num_layers: int, hidden_size: int, device: torch.device) -> "_Totals":
        """Before the first token."""

        def full(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full((num_layers, *shape), value, dtype=torch.float64, device=device)

        sublayers, least = len(SUBLAYERS), -float("inf")
        return cls(
            of_sublayers=full(sublayers, 5),
            tokens=full(),
            norms=full(),
            directions=full(hidden_size),
            largest_angle=full(sublayers),
            norm_range=full(2, value=least),
            activation=full(),
            attention_logit=full(value=least),
            logit=full(value=least)[0].clone(),
        )

    def over_ranks(self, group: dist.ProcessGroup | None) -> "_Totals":
        """The totals of all ranks of `group` together, on the CPU."""
        sums = (self.of_sublayers, self.tokens, self.norms, self.directions)
        maxima = (self.largest_angle, self.norm_range, self.activation, self.attention_logit, self.logit)
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


def _split(x: Tensor, norm: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Of `other` the component along x, whose norm is given, and the norm of the rest; along 0 for x = 0."""
    along = _ratio((x * other).sum(-1), norm)
    across = torch.addcmul(other, _ratio(along, norm).unsqueeze(-1), x, value=-1)
    return along, across.norm(dim=-1)
