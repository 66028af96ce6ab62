"""The parts of the kernels, each one or two passes over the hidden width, in torch's operations: the reference.

They calculate in fp32 whatever the storage type, in fp64 for fp64, and round once. A number of every row is [rows, 1].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.angle import Angle, angle_of, slope_in_scale
from megatron_ext.kernels.rows import RowKernels
from megatron_ext.kernels.step import Branch, Step, StepGradients, Turn


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type to calculate in: fp64 for fp64 storage, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows [..., hidden], [..., 1]."""
    return (a * b).sum(-1, keepdim=True)


def inverse_of(squared_norm: Tensor) -> Tensor:
    """1 / r^2, and 0 for a row of zeros."""
    tiny = torch.finfo(squared_norm.dtype).tiny
    return torch.where(squared_norm > tiny, 1 / squared_norm.clamp_min(tiny), 0.0)


def update_of(branch: Branch, dtype: torch.dtype) -> Tensor:
    """The update u in `dtype`: the sublayer's output after bias and dropout."""
    update = branch.output.to(dtype)
    if branch.bias is not None:
        update = update + branch.bias.to(dtype)
    return update if branch.kept is None else torch.where(branch.kept, update * (1 / (1 - branch.dropout)), 0.0)


def turn(state: Tensor, branch: Branch, how: Turn) -> tuple[Tensor, ...]:
    """1 / r^2, <x, u> / r^2 and beta^2 of every row, then what :func:`combine` weighs x and u by.

    In two passes over the width: u may be all but parallel to x.
    """
    dtype = compute_dtype(state)
    x, u = state.to(dtype), update_of(branch, dtype)
    inverse = inverse_of(dot(x, x))
    share = dot(x, u) * inverse
    v = torch.addcmul(u, share, x, value=-1)
    q = how.step_size**2 * dot(v, v) * inverse
    angle = _angle_of_live_rows(q, how, inverse)
    of_update = how.step_size * angle.sine
    return inverse, share, q, angle.cosine - of_update * share, of_update


def combine(state: Tensor, branch: Branch, of_state: Tensor, of_update: Tensor) -> Tensor:
    """of_state x + of_update u in the state's type."""
    x, u = state.to(of_state.dtype), update_of(branch, of_state.dtype)
    return torch.addcmul(of_state * x, of_update, u).to(state.dtype)


def turn_back(
    grad: Tensor,
    state: Tensor,
    known: Branch,
    numbers: tuple[Tensor, Tensor, Tensor],
    how: Turn,
    learned: tuple[bool, bool],
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """What :func:`combine_back` weighs by, and every row's part of the gradients of step size and scale if learned.

    Args:
        grad: of the new state.
        state: the old one.
        known: what the step was given, or with save=output the new state alone.
        numbers: inverse, share and q of the step.
        how: the step turned.
        learned: whether the step size, and the scale, wants a gradient.
    """
    dtype = numbers[0].dtype
    x, angle = state.to(dtype), _angle_of_live_rows(numbers[2], how, numbers[0])
    of_v = _weights_of_tangent(angle, numbers, how)
    v = _tangent(update_of(known, dtype), x, *of_v)
    weights, of_alpha, of_scale = _weights_back(grad.to(dtype), x, v, angle, numbers, how, learned)
    return (*of_v, *weights), of_alpha, of_scale


def combine_back(grad: Tensor, state: Tensor, known: Branch, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Gradients of x and u, the second without dropout's, by the weights of :func:`turn_back`."""
    dtype = weights[0].dtype
    x = state.to(dtype)
    v = _tangent(update_of(known, dtype), x, *weights[:2])
    of_state, of_update = _combine_back(grad.to(dtype), x, v, *weights[2:])
    return of_state.to(state.dtype), of_update.to(known.output.dtype)


def _weights_of_tangent(angle: Angle, numbers: tuple[Tensor, Tensor, Tensor], how: Turn) -> tuple[Tensor, Tensor]:
    """By which what is known, and x, make up v."""
    inverse, share, q = numbers
    if how.retraction.save == "update":
        return torch.ones_like(q), share
    of_known = torch.where(inverse > 0, 1 / (how.step_size * angle.sine), 0.0)  # v = (y - C x) / (alpha S)
    return of_known, of_known * angle.cosine


def _tangent(known: Tensor, x: Tensor, of_known: Tensor, of_state: Tensor) -> Tensor:
    """v = of_known known - of_state x, both products rounded: exactly zero where the step was."""
    return (of_known * known).sub_(of_state * x)


def _weights_back(
    g: Tensor,
    x: Tensor,
    v: Tensor,
    angle: Angle,
    numbers: tuple[Tensor, Tensor, Tensor],
    how: Turn,
    learned: tuple[bool, bool],
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """In residual form, with G = dL/dv and h = dL/dq."""
    (inverse, share, q), alpha = numbers, how.step_size
    sine = alpha * angle.sine
    grad_x, grad_v, x_v = dot(g, x), dot(g, v), dot(x, v)  # the last is all but zero
    # Through C and S; q depends on v and on r.
    h = angle.cosine_slope * grad_x + alpha * angle.sine_slope * grad_v
    # G = sine g + tangential v; v depends on u and, through the projection, on x.
    tangential = 2 * alpha**2 * h * inverse
    along = (sine * grad_x + tangential * x_v) * inverse
    weights = (angle.cosine, sine, 2 * q * h * inverse, tangential, along, share)
    of_alpha = angle.sine * grad_v + 2 * q * h / alpha if learned[0] else None
    of_scale = None
    if learned[1]:
        # dC/ds = -sin(theta) phi and dS/ds = cos(theta) phi / beta, where the angle still grows.
        slope = slope_in_scale(q, how.retraction.power, how.scale, how.retraction.max_angle)
        of_scale = slope * (alpha * angle.cosine * grad_v - q * angle.sine * grad_x)
    return weights, of_alpha, of_scale


def _combine_back(
    g: Tensor,
    x: Tensor,
    v: Tensor,
    cosine: Tensor,
    sine: Tensor,
    radial: Tensor,
    tangential: Tensor,
    along: Tensor,
    share: Tensor,
) -> tuple[Tensor, Tensor]:
    """du = sine g + tangential v - along x,    dx = cosine g - radial x - along v - share du"""
    of_update = (sine * g).addcmul_(tangential, v).addcmul_(along, x, value=-1)
    of_state = (cosine * g).addcmul_(radial, x, value=-1).addcmul_(along, v, value=-1)
    return of_state.addcmul_(share, of_update, value=-1), of_update


def norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm (arXiv 1910.07467): gain x / sqrt(mean(x^2) + eps), and that last factor of every row."""
    wide = x.to(compute_dtype(x))
    factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * factor * gain.to(wide.dtype)).to(x.dtype), factor


def norm_back(grad: Tensor, x: Tensor, gain: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [rows, hidden] and of the gain [hidden]."""
    unit = x.to(factor.dtype) * factor
    g = grad.to(factor.dtype)
    of_unit = g * gain.to(factor.dtype)
    grad_x = factor * (of_unit - unit * (of_unit * unit).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (g * unit).sum(0).to(gain.dtype)


def swiglu(gate_and_value: Tensor) -> Tensor:
    """silu(gate) value from [rows, 2 width]: [rows, width] (SwiGLU, arXiv 2002.05202)."""
    gate, value = gate_and_value.chunk(2, dim=-1)
    return F.silu(gate) * value


def swiglu_back(grad: Tensor, gate_and_value: Tensor) -> Tensor:
    """Gradient of the input, rounded where autograd rounds it."""
    gate, value = gate_and_value.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(grad * value, gate)
    return torch.cat([of_gate, grad * F.silu(gate)], dim=-1)


def _angle_of_live_rows(q: Tensor, how: Turn, inverse: Tensor) -> Angle:
    """C, S and their slopes, with C = S = 0 in the rows of zeros: neither a value nor a gradient passes there."""
    angle = angle_of(q, how.retraction.power, how.scale, how.retraction.max_angle)
    live = (inverse > 0).to(q.dtype)
    return angle._replace(cosine=live * angle.cosine, sine=live * angle.sine)


class Eager(RowKernels):
    """The reference; what both parts of a step read is computed once for them."""

    def step(self, state: Tensor, branch: Branch, turn: Turn) -> Step:
        """As :meth:`megatron_ext.kernels.rows.RowKernels.step`."""
        dtype = compute_dtype(state)
        step = super().step(state.to(dtype), Branch(update_of(branch, dtype)), turn)
        return step._replace(state=step.state.to(state.dtype))

    def step_back(
        self,
        grad: Tensor,
        state: Tensor,
        known: Branch,
        numbers: tuple[Tensor, Tensor, Tensor],
        turn: Turn,
        learned: tuple[bool, bool],
    ) -> StepGradients:
        """As :meth:`megatron_ext.kernels.rows.RowKernels.step_back`."""
        dtype = numbers[0].dtype
        g, x = grad.to(dtype), state.to(dtype)
        angle = _angle_of_live_rows(numbers[2], turn, numbers[0])
        v = _tangent(update_of(known, dtype), x, *_weights_of_tangent(angle, numbers, turn))
        weights, *of_rows = _weights_back(g, x, v, angle, numbers, turn, learned)
        of_state, of_update = _combine_back(g, x, v, *weights)
        sums = (None if rows is None else rows.sum() for rows in of_rows)
        return StepGradients(of_state.to(state.dtype), of_update.to(known.output.dtype), *sums)
