"""The residual schemes in plain PyTorch, each written from its definition; autograd makes the gradients.

A step takes the state x [batch, sequence, hidden], the sublayer F and where it stands, and gives the new state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import ModelSettings

Weights = dict[str, Tensor]
Sublayer = Callable[[Tensor], Tensor]


def norm(weights: Weights, name: str, x: Tensor, model: ModelSettings, kind: str | None = None) -> Tensor:
    if (kind or model.normalization) == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", torch.zeros(()))


def dyt(weights: Weights, name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] * torch.tanh(weights[f"{name}.alpha"] * x) + weights[f"{name}.bias"]


@dataclass(frozen=True)
class Place:
    """One sublayer; `weights` are its layer's, `layer` counts from 0, `number` is 0 for attention and 1 for the MLP."""

    weights: Weights
    model: ModelSettings
    layer: int
    number: int

    @property
    def input_norm(self) -> str:
        return ("input_layernorm", "pre_mlp_layernorm")[self.number]

    @property
    def output(self) -> str:
        return ("self_attn_bda", "mlp_bda")[self.number]

    @property
    def k(self) -> int:
        return 2 * self.layer + self.number + 1

    def before(self, x: Tensor) -> Tensor:
        return norm(self.weights, self.input_norm, x, self.model)

    def after(self, x: Tensor) -> Tensor:
        return norm(self.weights, f"{self.output}.norm", x, self.model)

    def number_named(self, name: str, constant: float) -> float | Tensor:
        raw = self.weights.get(f"{self.output}.{name}.raw")
        return constant if raw is None else torch.log1p(raw.exp())


def pre_norm(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return x + f(at.before(x))


def post_norm(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return at.after(x + f(x))


def deep_norm(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return at.after((2 * at.model.num_layers) ** (1 / 4) * x + f(x))


def sandwich_norm(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return x + at.after(f(at.before(x)))


def pre_dyt(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return x + f(dyt(at.weights, at.input_norm, x))


def keel(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    highway = 1 if at.k == 1 else 2 * at.model.num_layers
    return at.after(highway * x + f(at.before(x)))


def ngpt_lerp(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    r, d = x.norm(dim=-1, keepdim=True), at.model.hidden_size
    u = f(x)
    share = (at.weights[f"{at.output}.rate"] * at.model.residual.alpha * math.sqrt(d)).abs()
    moved = x + share * (r * u / u.norm(dim=-1, keepdim=True) - x)
    return r * moved / moved.norm(dim=-1, keepdim=True)


def geonorm(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return along_the_sphere(x, f(x), at, lambda beta: beta)


def proj(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return along_the_sphere(x, f(x), at, torch.atan)


def cayley(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    return along_the_sphere(x, f(x), at, lambda beta: 2 * torch.atan(beta / 2))


def any_power(x: Tensor, f: Sublayer, at: Place) -> Tensor:
    p = at.model.residual.p
    return along_the_sphere(x, f(x), at, lambda beta: p * torch.atan(beta / p))


def along_the_sphere(x: Tensor, u: Tensor, at: Place, phi: Callable[[Tensor], Tensor]) -> Tensor:
    settings = at.model.residual
    alpha = at.number_named("alpha", settings.alpha) * decay(at)
    scale = at.number_named("angle_scale", settings.angle_scale)
    r = x.norm(dim=-1, keepdim=True)
    v = u - (x * u).sum(-1, keepdim=True) / r**2 * x
    beta = alpha * v.norm(dim=-1, keepdim=True) / r
    theta = (scale * phi(beta)).clamp_max(math.inf if settings.clamp == "none" else settings.clamp)
    return theta.cos() * x + alpha * theta.sin() / beta * v


def decay(at: Place) -> float:
    by_layer = at.model.residual.step_index == "layer"
    k = at.layer + 1 if by_layer else at.k
    count = at.model.num_layers * (1 if by_layer else 2)
    kinds = {"harmonic": 1 / k, "sqrt": 1 / math.sqrt(k), "linear": (count - k + 1) / count, "none": 1.0}
    return kinds[at.model.residual.decay]


STEPS: dict[str, Callable[[Tensor, Sublayer, Place], Tensor]] = {
    "geonorm": geonorm,
    "proj": proj,
    "cayley": cayley,
    "p": any_power,
    "ngpt_lerp": ngpt_lerp,
    "pre_norm": pre_norm,
    "post_norm": post_norm,
    "deep_norm": deep_norm,
    "sandwich_norm": sandwich_norm,
    "peri_ln": sandwich_norm,
    "pre_dyt": pre_dyt,
    "keel": keel,
}
ON_THE_SPHERE = ("geonorm", "proj", "cayley", "p", "ngpt_lerp")


def enter(x: Tensor, weights: Weights, model: ModelSettings) -> Tensor:
    """What the embedded tokens pass before the first layer."""
    if model.residual.scheme == "peri_ln":
        return norm(weights, "decoder.layers.0.entry", x, model)
    if model.residual.dyt_embedding_scale:
        return weights["decoder.layers.0.entry.scale"] * x
    if model.residual.scheme not in ON_THE_SPHERE:
        return x
    radius = model.residual.radius
    if radius == "sqrt_hidden":
        radius = math.sqrt(model.hidden_size)
    elif radius == "learned":
        radius = F.softplus(weights["decoder.layers.0.entry.radius.raw"])
    return radius * x / x.norm(dim=-1, keepdim=True)


def leave(x: Tensor, weights: Weights, model: ModelSettings) -> Tensor:
    """What stands before the output layer."""
    scheme, name = model.residual.scheme, "decoder.final_layernorm"
    if scheme in ("post_norm", "deep_norm", "keel") or model.residual.final_norm == "none":
        return x
    if scheme == "pre_dyt":
        return dyt(weights, name, x)
    return norm(weights, name, x, model, model.residual.final_norm)
