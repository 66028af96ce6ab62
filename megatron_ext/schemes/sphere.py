"""Schemes whose states stay on a sphere: the family of retractions, and nGPT's interpolation."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.angle import free_angle
from megatron_ext.kernels import Branch
from megatron_ext.kernels.config import choice_in
from megatron_ext.kernels.eager import compute_dtype, update_of
from megatron_ext.norms import NORM_NAMES, NORMS, learned_scalar, mark_replicated, model_norm, starting_at
from megatron_ext.residual import Residual, Sublayer
from megatron_ext.retraction import (
    LARGEST_SAFE_ANGLE,
    SMALLEST_SAFE_BOUND,
    STEP_SIZE_DECAYS,
    Retraction,
    project_to_sphere,
    retract,
)
from megatron_ext.schemes.scheme import Scheme, norm_parameters
from megatron_ext.settings import ResidualSettings


class PositiveNumber(nn.Module):
    """A positive number, constant or learned as softplus(raw).

    It is called as a function, past the hooks of modules: those that others put on all modules expect tensors.
    """

    def __init__(self, start: float, learned: bool, config: TransformerConfig) -> None:
        super().__init__()
        self.start = start
        # softplus(raw) = start
        raw = start + math.log(-math.expm1(-start))
        self.raw = learned_scalar(raw, config.params_dtype) if learned else None
        mark_replicated(self, config)

    def __call__(self) -> float | Tensor:
        """The number; learned, a tensor [1] in fp32 (fp64 for fp64 parameters)."""
        return self.start if self.raw is None else F.softplus(self.raw.to(compute_dtype(self.raw)))


class RetractionResidual(Residual):
    """A step along the sphere (GeoNorm, arXiv 2601.22095; Sphere Retraction Normalizations, arXiv 2608.02668)."""

    def __init__(self, at: Sublayer, power: float) -> None:
        super().__init__(at)
        settings = at.settings
        assert settings.alpha is not None
        assert settings.angle_scale is not None
        self.retraction = Retraction(power, largest_angle(settings), save=kept_for_backward(settings, power))
        self.decay = step_size_decay(at)
        self.alpha = PositiveNumber(settings.alpha, bool(settings.learn_alpha), at.config)
        self.angle_scale = PositiveNumber(settings.angle_scale, bool(settings.learn_angle_scale), at.config)
        self.kernels = choice_in(at.config)

    def take(self, state: Tensor, output: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
        """One kernel adds the bias, drops and steps."""
        kept = torch.empty_like(output, dtype=torch.bool).bernoulli_(1 - dropout) if dropout else None
        new_state = self.join(state, output, bias=bias, kept=kept, dropout=dropout)
        if self.observer is not None:
            update = update_of(Branch(output, bias, kept, dropout), compute_dtype(state))
            self.observer(self, state, update, new_state)
        return new_state

    def join(self, state: Tensor, increment: Tensor, **before: Any) -> Tensor:
        """See :func:`megatron_ext.retraction.retract`, to which `before` goes."""
        return retract(
            state, increment, self.step_size(), self.retraction, self.angle_scale(), kernels=self.kernels, **before
        )

    def step_size(self) -> float | Tensor:
        """alpha after the decay."""
        alpha: float | Tensor = self.alpha()
        return alpha * self.decay

    def share_clamped(self, beta: Tensor) -> Tensor:
        """1.0 where the angle of a step is cut off."""
        if self.retraction.max_angle is None:
            return super().share_clamped(beta)
        angle = free_angle(beta.square(), self.retraction.power, self.angle_scale())
        return (angle > self.retraction.max_angle).to(beta.dtype)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"decay={self.decay:.4g}, {self.retraction}"


class LerpResidual(Residual):
    """r normalise(x + a (r u/|u| - x)), a = |learned| per channel: the residual of nGPT (arXiv 2410.01131)."""

    def __init__(self, at: Sublayer) -> None:
        super().__init__(at)
        assert at.settings.alpha is not None
        hidden_size = int(at.config.hidden_size)
        # Stored smaller than it acts, so that Adam's steps are small against it.
        stored = 1 / math.sqrt(hidden_size)
        self.gain = at.settings.alpha / stored
        self.rate = starting_at(nn.Parameter(torch.full((hidden_size,), stored, dtype=at.config.params_dtype)), stored)
        mark_replicated(self, at.config)

    def increment(self, state: Tensor, update: Tensor) -> Tensor:
        """r u/|u| - x, in fp32 (fp64 for fp64 states)."""
        x, u = (tensor.to(compute_dtype(state)) for tensor in (state, update))
        # An update of zeros has no direction: it stays zero with no gradient, where normalize has one of 1e12.
        return project_to_sphere(u, x.norm(dim=-1, keepdim=True)) - x

    def join(self, state: Tensor, increment: Tensor) -> Tensor:
        """Move each channel by its own share of the increment, and back to the sphere."""
        x = state.to(increment.dtype)
        moved = x + self._share() * increment
        return project_to_sphere(moved, x.norm(dim=-1, keepdim=True)).to(state.dtype)

    def step_size(self) -> Tensor:
        """Mean of a over the channels."""
        return self._share().mean()

    def _share(self) -> Tensor:
        return self.rate.to(compute_dtype(self.rate)).abs() * self.gain


class SphereEntry(nn.Module):
    """Puts the embedded tokens [..., hidden] on the sphere."""

    def __init__(self, config: TransformerConfig, settings: ResidualSettings) -> None:
        super().__init__()
        radius = settings.radius
        start = float(radius) if isinstance(radius, (int, float)) else math.sqrt(config.hidden_size)
        self.radius = PositiveNumber(start, radius == "learned", config)

    def forward(self, embedded: Tensor) -> Tensor:
        """Same shape and type; every row has the radius as its norm."""
        return project_to_sphere(embedded, self.radius())


def step_size_decay(at: Sublayer) -> float:
    """Factor of the step size of one sublayer."""
    by_layer = at.settings.step_index == "layer"
    index = at.layer_number if by_layer else at.index
    count = int(at.config.num_layers) if by_layer else at.count
    return STEP_SIZE_DECAYS[at.settings.decay or "none"](index, count)


def largest_angle(settings: ResidualSettings) -> float | None:
    """The clamp in radians, None for none."""
    return None if settings.clamp in ("none", None) else float(settings.clamp)


def kept_for_backward(settings: ResidualSettings, power: float) -> Any:
    """What was asked for, else the output where that is safe."""
    if settings.save is not None:
        return settings.save
    return "update" if why_output_is_unsafe(settings, power) else "output"


def why_output_is_unsafe(settings: ResidualSettings, power: float) -> str | None:
    """The setting that keeps the update from being rebuilt from the output, and what to change; None for none.

    Near pi and at a small bound the output no longer shows the update, and at small steps a learned number gets no
    usable gradient from it.
    """
    if settings.learn_alpha or settings.learn_angle_scale:
        return "learn_alpha and learn_angle_scale must be false"
    bound = (settings.angle_scale or 1.0) * power * math.pi / 2
    angle = min(bound, largest_angle(settings) or math.inf)
    if angle < SMALLEST_SAFE_BOUND:
        return f"angles of at most {angle:.2g} rad vanish in the rounding; let them grow to {SMALLEST_SAFE_BOUND} rad"
    if angle < LARGEST_SAFE_ANGLE:
        return None
    return f"the angle of a step must stay below {LARGEST_SAFE_ANGLE} rad; set clamp to less than that"


def power_of(settings: ResidualSettings) -> float:
    """Exponent of the retraction that a sphere scheme steps with; inf for the exponential map."""
    return POWERS[settings.scheme] if settings.scheme in POWERS else float(settings.p or math.nan)


POWERS = {"geonorm": math.inf, "proj": 1.0, "cayley": 2.0}
"""The schemes whose exponent is fixed."""


def _retraction_residual(at: Sublayer) -> Residual:
    return RetractionResidual(at, power_of(at.settings))


def _final_norm(config: TransformerConfig, settings: ResidualSettings) -> Any:
    if settings.final_norm == "none":
        return None
    return NORMS[NORM_NAMES[settings.final_norm]] if settings.final_norm else model_norm(config)


def _final_norm_parameters(config: TransformerConfig, settings: ResidualSettings) -> int:
    norm = _final_norm(config, settings)
    return 0 if norm is None else norm_parameters(config, norm)


def _retraction_parameters(config: TransformerConfig, settings: ResidualSettings) -> int:
    per_sublayer = bool(settings.learn_alpha) + bool(settings.learn_angle_scale)
    radius = int(settings.radius == "learned")
    return 2 * int(config.num_layers) * per_sublayer + radius + _final_norm_parameters(config, settings)


def _lerp_parameters(config: TransformerConfig, settings: ResidualSettings) -> int:
    radius = int(settings.radius == "learned")
    return 2 * int(config.num_layers * config.hidden_size) + radius + _final_norm_parameters(config, settings)


_COMMON = {"radius": "sqrt_hidden", "final_norm": None, "output_init": "scaled"}
_STEP = {"angle_scale": 1.0, "learn_angle_scale": False, "save": None, **_COMMON}
_SPHERET = {"decay": "sqrt", "step_index": "sublayer", "alpha": 1.0, "learn_alpha": True, "clamp": "none", **_STEP}

_sphere_scheme = partial(
    Scheme,
    residual=_retraction_residual,
    parameters=_retraction_parameters,
    # Per sublayer: <x,u>, |x|^2, v, |v|^2 at 2 each, y at 3.
    flops=lambda hidden_size: 2 * 11 * hidden_size,
    final_norm=_final_norm,
    entry=SphereEntry,
    on_sphere=True,
)

GEONORM = _sphere_scheme(
    name="geonorm",
    source="GeoNorm, arXiv 2601.22095: the exponential map of the sphere",
    defaults={
        "decay": "harmonic",
        "step_index": "layer",
        "alpha": 1.0,
        "learn_alpha": False,
        "clamp": math.pi / 2,  # a guard; the paper's main formula has none
        **_STEP,
    },
)
PROJ = _sphere_scheme(
    name="proj", source="Sphere Retraction Normalizations, arXiv 2608.02668: metric projection", defaults=_SPHERET
)
CAYLEY = _sphere_scheme(
    name="cayley", source="Sphere Retraction Normalizations, arXiv 2608.02668: Cayley's map", defaults=_SPHERET
)
P = _sphere_scheme(
    name="p",
    source="Sphere Retraction Normalizations, arXiv 2608.02668: p arctan(beta / p)",
    defaults=_SPHERET,
    required=("p",),
)
NGPT_LERP = _sphere_scheme(
    name="ngpt_lerp",
    source="nGPT, arXiv 2410.01131: the residual alone",
    residual=LerpResidual,
    parameters=_lerp_parameters,
    # Per sublayer: |x|^2, |u|^2, |moved|^2 at 2 each, u/|u| - x and moved at 2 each, the last scale at 1.
    flops=lambda hidden_size: 2 * 11 * hidden_size,
    defaults={"alpha": 0.05, **_COMMON},
)

SCHEMES = (GEONORM, PROJ, CAYLEY, P, NGPT_LERP)
"""What this file adds to the registry."""
