"""SwiGLU and its gradient as Triton kernels: a block of one row's columns a program, fp32 inside."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl


@triton.jit
def _gate_and_value(hidden, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = row * 2 * width + columns
    gate = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(hidden + place + width, mask=inside, other=0.0).to(tl.float32)
    return gate, value, row * width + columns, place, inside


@triton.jit
def forward(hidden, result, width, BLOCK: tl.constexpr):
    """silu(gate) value from contiguous rows of gate and value."""
    gate, value, place, _, inside = _gate_and_value(hidden, width, BLOCK)
    y = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(result + place, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def backward(grad, hidden, grad_hidden, width, BLOCK: tl.constexpr):
    """Gradients of gate and value, side by side as they are."""
    gate, value, place, wide_place, inside = _gate_and_value(hidden, width, BLOCK)
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = g * value * share * (1.0 + gate * (1.0 - share))
    of_value = g * gate * share
    kind = grad_hidden.dtype.element_ty
    tl.store(grad_hidden + wide_place, of_gate.to(kind), mask=inside)
    tl.store(grad_hidden + wide_place + width, of_value.to(kind), mask=inside)
