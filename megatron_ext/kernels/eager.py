"""The parts of the kernels that run over the hidden width, in torch's operations one by one: the reference.

They calculate in fp32 whatever the storage type, in fp64 for fp64, and round once. A number of every row is [rows, 1].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.kernels.step import Branch


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


def measure(state: Tensor, branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
    """1 / r^2, <x, u> / r^2 and |v|^2 of every row. In two passes: u may be all but parallel to x."""
    dtype = compute_dtype(state)
    x, u = state.to(dtype), update_of(branch, dtype)
    inverse = inverse_of(dot(x, x))
    share = dot(x, u) * inverse
    v = u - share * x
    return inverse, share, dot(v, v)


def combine(state: Tensor, branch: Branch, of_state: Tensor, of_update: Tensor) -> Tensor:
    """of_state x + of_update u in the state's type."""
    x, u = state.to(of_state.dtype), update_of(branch, of_state.dtype)
    return (of_state * x + of_update * u).to(state.dtype)


def measure_back(
    grad: Tensor, state: Tensor, known: Branch, of_known: Tensor, of_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """<g, x>, <g, v> and <x, v> of every row, where v = of_known known - of_state x. The last is all but zero."""
    dtype = of_state.dtype
    g, x = grad.to(dtype), state.to(dtype)
    v = of_known * update_of(known, dtype) - of_state * x
    return dot(g, x), dot(g, v), dot(x, v)


def combine_back(
    grad: Tensor,
    state: Tensor,
    known: Branch,
    of_known: Tensor,
    of_state: Tensor,
    cosine: Tensor,
    sine: Tensor,
    radial: Tensor,
    tangential: Tensor,
    along: Tensor,
    share: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and u, the second without dropout's, from v as in :func:`measure_back`.

    du = sine g + tangential v - along x,    dx = cosine g - radial x - along v - share du
    """
    dtype = of_state.dtype
    g, x = grad.to(dtype), state.to(dtype)
    v = of_known * update_of(known, dtype) - of_state * x
    grad_update = sine * g + tangential * v - along * x
    grad_state = cosine * g - radial * x - along * v - share * grad_update
    return grad_state.to(state.dtype), grad_update.to(known.output.dtype)


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
