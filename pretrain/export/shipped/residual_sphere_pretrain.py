"""How a sublayer's output joins the residual stream: the twelve schemes.

On the sphere every state x keeps its norm r: a sublayer's output u moves it along the sphere by

    v = u - (<x, u> / r^2) x,    beta = alpha |v| / r,    theta = min(s p arctan(beta / p), clamp)
    y = cos(theta) x + alpha (sin(theta) / beta) v

(GeoNorm, arXiv 2601.22095, where p is infinite and the angle s beta; Sphere Retraction Normalizations, arXiv
2608.02668).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_sphere_pretrain import SpherePretrainConfig

# Below this argument a function of a square is its series, which is exact there in fp64 and has a gradient at 0.
_SERIES_BELOW = 1e-2


def _smooth(square: Tensor, coefficients: list[float], exact: Callable[[Tensor], Tensor]) -> Tensor:
    near_zero = square < _SERIES_BELOW
    series = torch.full_like(square, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        series = series * square + coefficient
    return torch.where(near_zero, series, exact(torch.where(near_zero, 1.0, square).sqrt()))


def cosine_of_root(square: Tensor) -> Tensor:
    """cos(t) of t^2."""
    return _smooth(square, [(-1) ** n / math.factorial(2 * n) for n in range(8)], torch.cos)


def sinc_of_root(square: Tensor) -> Tensor:
    """sin(t) / t of t^2."""
    return _smooth(square, [(-1) ** n / math.factorial(2 * n + 1) for n in range(8)], lambda t: t.sin() / t)


def arctan_ratio_of_root(square: Tensor) -> Tensor:
    """arctan(t) / t of t^2."""
    return _smooth(square, [(-1) ** n / (2 * n + 1) for n in range(9)], lambda t: t.atan() / t)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type to calculate in: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def project_to_sphere(state: Tensor, radius: float | Tensor) -> Tensor:
    """Scale each row of `state` [..., hidden] to norm `radius`; a row of zeros stays zero."""
    x = state.to(compute_dtype(state))
    square = x.square().sum(-1, keepdim=True)
    scale = torch.where(square > 0, radius * square.clamp_min(torch.finfo(x.dtype).tiny).rsqrt(), 0.0)
    return (x * scale).to(state.dtype)


class PositiveNumber(nn.Module):
    """A constant, or softplus(raw)."""

    def __init__(self, constant: float, learned: bool) -> None:
        super().__init__()
        self.constant = constant
        self.raw = nn.Parameter(torch.full((1,), constant + math.log(-math.expm1(-constant)))) if learned else None

    def forward(self) -> float | Tensor:
        """The number."""
        return self.constant if self.raw is None else F.softplus(self.raw.to(compute_dtype(self.raw)))


class DynamicTanh(nn.Module):
    """weight * tanh(alpha x) + bias (arXiv 2503.10622)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type."""
        return torch.tanh(self.alpha * x) * self.weight + self.bias


def make_norm(kind: str, size: int, epsilon: float) -> nn.Module:
    """A norm over the last dimension; ``none`` passes its input on."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "rmsnorm": lambda: nn.RMSNorm(size, eps=epsilon),
        "layernorm": lambda: nn.LayerNorm(size, eps=epsilon),
        "dyt": lambda: DynamicTanh(size),
        "none": nn.Identity,
    }
    return makers[kind]()


class Residual(nn.Module):
    """(state, update) -> new state; `index` is that of the sublayer in the network, 1-based."""

    def __init__(self, config: SpherePretrainConfig, index: int) -> None:
        super().__init__()


class Sum(Residual):
    """x + u."""

    def forward(self, state: Tensor, update: Tensor) -> Tensor:
        """The new state."""
        return state + update


class SumOfNormed(Residual):
    """x + N(u)."""

    def __init__(self, config: SpherePretrainConfig, index: int) -> None:
        super().__init__(config, index)
        self.norm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon)

    def forward(self, state: Tensor, update: Tensor) -> Tensor:
        """The new state."""
        normed: Tensor = self.norm(update)
        return state + normed


class NormedSum(Residual):
    """N(a x + u); a is 1, (2 L)^(1/4) for deep_norm, 2 L for keel behind its first sublayer (L layers)."""

    def __init__(self, config: SpherePretrainConfig, index: int) -> None:
        super().__init__(config, index)
        sublayers = 2 * config.num_hidden_layers
        weights = {"post_norm": 1.0, "deep_norm": sublayers**0.25, "keel": 1.0 if index == 1 else float(sublayers)}
        self.weight_of_state = weights[config.scheme]
        self.norm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon)

    def forward(self, state: Tensor, update: Tensor) -> Tensor:
        """The new state."""
        new_state: Tensor = self.norm(self.weight_of_state * state + update)
        return new_state


class Interpolation(Residual):
    """r normalise(x + a (r u/|u| - x)), a = |rate| alpha sqrt(hidden) per channel (nGPT, arXiv 2410.01131)."""

    def __init__(self, config: SpherePretrainConfig, index: int) -> None:
        super().__init__(config, index)
        self.gain = config.alpha * math.sqrt(config.hidden_size)
        self.rate = nn.Parameter(torch.full((config.hidden_size,), 1 / math.sqrt(config.hidden_size)))

    def forward(self, state: Tensor, update: Tensor) -> Tensor:
        """The new state."""
        x, u = (tensor.to(compute_dtype(state)) for tensor in (state, update))
        radius = x.norm(dim=-1, keepdim=True)
        moved = x + self.rate.to(x.dtype).abs() * self.gain * (project_to_sphere(u, radius) - x)
        return project_to_sphere(moved, radius).to(state.dtype)


class Retraction(Residual):
    """The step along the sphere at the head of this file."""

    def __init__(self, config: SpherePretrainConfig, index: int) -> None:
        super().__init__(config, index)
        by_layer = config.step_index == "layer"
        k, count = (-(-index // 2), config.num_hidden_layers) if by_layer else (index, 2 * config.num_hidden_layers)
        decays = {"harmonic": 1 / k, "sqrt": k**-0.5, "linear": (count - k + 1) / count, "none": 1.0}
        self.decay, self.power, self.clamp = decays[config.decay], config.power, config.clamp
        self.alpha = PositiveNumber(config.alpha, config.learn_alpha)
        self.angle_scale = PositiveNumber(config.angle_scale, config.learn_angle_scale)

    def forward(self, state: Tensor, update: Tensor) -> Tensor:
        """The new state."""
        x, u = (tensor.to(compute_dtype(state)) for tensor in (state, update))
        tiny = torch.finfo(x.dtype).tiny
        square = x.square().sum(-1, keepdim=True)
        inverse = torch.where(square > tiny, 1 / square.clamp_min(tiny), 0.0)
        alpha = self.alpha() * self.decay
        v = u - ((x * u).sum(-1, keepdim=True) * inverse) * x
        cosine, sine = self._angle(alpha**2 * v.square().sum(-1, keepdim=True) * inverse)
        return torch.where(square > tiny, cosine * x + (alpha * sine) * v, 0.0).to(state.dtype)

    def _angle(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """cos(theta) and sin(theta) / beta of q = beta^2, [..., 1]."""
        turn = self.angle_scale() * (1.0 if self.power is None else arctan_ratio_of_root(q / self.power**2))
        square = turn**2 * q
        cosine, sine = cosine_of_root(square), turn * sinc_of_root(square)
        if self.clamp is None:
            return cosine, sine
        over = square > self.clamp**2
        clamped = math.sin(self.clamp) * torch.where(over, q, 1.0).rsqrt()
        return torch.where(over, math.cos(self.clamp), cosine), torch.where(over, clamped, sine)


RESIDUALS: dict[str, type[Residual]] = {
    **dict.fromkeys(("geonorm", "proj", "cayley", "p"), Retraction),
    "ngpt_lerp": Interpolation,
    **dict.fromkeys(("pre_norm", "pre_dyt"), Sum),
    **dict.fromkeys(("sandwich_norm", "peri_ln"), SumOfNormed),
    **dict.fromkeys(("post_norm", "deep_norm", "keel"), NormedSum),
}
"""By the name of the scheme."""


class SphereEntry(nn.Module):
    """Puts the embedded tokens on the sphere."""

    def __init__(self, config: SpherePretrainConfig) -> None:
        super().__init__()
        constant = config.radius if isinstance(config.radius, (int, float)) else math.sqrt(config.hidden_size)
        self.radius = PositiveNumber(float(constant), config.radius == "learned")

    def forward(self, embedded: Tensor) -> Tensor:
        """Same shape and type."""
        return project_to_sphere(embedded, self.radius())


class EmbeddingScale(nn.Module):
    """A learned factor on the embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, embedded: Tensor) -> Tensor:
        """Same shape and type."""
        return self.scale * embedded


def make_entry(config: SpherePretrainConfig) -> nn.Module:
    """What the embedded tokens pass before the first layer."""
    if RESIDUALS[config.scheme] in (Retraction, Interpolation):
        return SphereEntry(config)
    if config.scheme == "peri_ln":
        return make_norm(config.normalization, config.hidden_size, config.norm_epsilon)
    return EmbeddingScale() if config.embedding_scale else nn.Identity()
