"""A step along the sphere as two Triton kernels: one row a program, held in registers, fp32 inside, no atomics."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, ANN201, N803

import triton
import triton.language as tl

from megatron_ext.kernels.triton_angle import angle_of

# The smallest normal number of fp32: a row whose squared norm does not exceed it counts as a row of zeros.
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _number(value, IS_TENSOR: tl.constexpr):
    return tl.load(value).to(tl.float32) if IS_TENSOR else value


@triton.jit
def _row(start, stride, row, columns, inside):
    return tl.load(start + row * stride + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _update(
    output,
    stride,
    bias,
    kept,
    keep_scale,
    row,
    hidden,
    columns,
    inside,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
):
    """The update: a sublayer's output after bias and dropout."""
    u = _row(output, stride, row, columns, inside)
    if BIAS:
        u += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        keep = tl.load(kept + row * hidden + columns, mask=inside, other=0)
        u = tl.where(keep != 0, u * keep_scale, 0.0)
    return u


@triton.jit
def forward(
    state,
    state_stride,
    output,
    output_stride,
    bias,
    kept,
    keep_scale,
    step_size,
    scale,
    new_state,
    inverse_out,
    share_out,
    q_out,
    hidden,
    bound,
    cos_bound,
    sin_bound,
    BLOCK: tl.constexpr,
    POWER: tl.constexpr,
    FREE: tl.constexpr,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    STEP_SIZE_IS_TENSOR: tl.constexpr,
    SCALE_IS_TENSOR: tl.constexpr,
):
    """Reads x and u once and writes y; 1 / r^2, <x, u> / r^2 and q of the row go out for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = _row(state, state_stride, row, columns, inside)
    u = _update(output, output_stride, bias, kept, keep_scale, row, hidden, columns, inside, BIAS, DROP)
    alpha = _number(step_size, STEP_SIZE_IS_TENSOR)
    squared_norm = tl.sum(x * x, 0)
    live = squared_norm > _TINY
    inverse = tl.where(live, 1.0 / tl.where(live, squared_norm, 1.0), 0.0)
    share = tl.sum(x * u, 0) * inverse
    v = u - share * x
    q = alpha * alpha * tl.sum(v * v, 0) * inverse
    cosine, sine, _, _, _ = angle_of(q, _number(scale, SCALE_IS_TENSOR), POWER, FREE, bound, cos_bound, sin_bound)
    y = tl.where(live, cosine, 0.0) * x + tl.where(live, alpha * sine, 0.0) * v
    tl.store(new_state + row * hidden + columns, y.to(new_state.dtype.element_ty), mask=inside)
    tl.store(inverse_out + row, inverse)
    tl.store(share_out + row, share)
    tl.store(q_out + row, q)


@triton.jit
def backward(
    grad,
    grad_stride,
    state,
    state_stride,
    known,
    known_stride,
    bias,
    kept,
    keep_scale,
    step_size,
    scale,
    inverse_in,
    share_in,
    q_in,
    grad_state,
    grad_update,
    of_step_size,
    of_scale,
    hidden,
    bound,
    cos_bound,
    sin_bound,
    BLOCK: tl.constexpr,
    POWER: tl.constexpr,
    FREE: tl.constexpr,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    STEP_SIZE_IS_TENSOR: tl.constexpr,
    SCALE_IS_TENSOR: tl.constexpr,
    STEP_SIZE_LEARNED: tl.constexpr,
    SCALE_LEARNED: tl.constexpr,
    OUTPUT_SAVED: tl.constexpr,
):
    """Reads x, g and the update (or y) once, writes dx and du, and the row's part of the learned numbers' gradients."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    g = _row(grad, grad_stride, row, columns, inside)
    x = _row(state, state_stride, row, columns, inside)
    inverse, share, q = tl.load(inverse_in + row), tl.load(share_in + row), tl.load(q_in + row)
    alpha = _number(step_size, STEP_SIZE_IS_TENSOR)
    live = inverse > 0
    cosine, sine, cosine_slope, sine_slope, slope = angle_of(
        q, _number(scale, SCALE_IS_TENSOR), POWER, FREE, bound, cos_bound, sin_bound
    )
    cosine, sine = tl.where(live, cosine, 0.0), tl.where(live, sine, 0.0)
    if OUTPUT_SAVED:
        y = _row(known, known_stride, row, columns, inside)
        v = tl.where(live, 1.0 / tl.where(live, alpha * sine, 1.0), 0.0) * (y - cosine * x)
    else:
        u = _update(known, known_stride, bias, kept, keep_scale, row, hidden, columns, inside, BIAS, DROP)
        v = u - share * x
    grad_x, grad_v, x_v = tl.sum(g * x, 0), tl.sum(g * v, 0), tl.sum(x * v, 0)
    h = cosine_slope * grad_x + alpha * sine_slope * grad_v
    tangential = 2.0 * alpha * alpha * h * inverse
    along = (alpha * sine * grad_x + tangential * x_v) * inverse
    du = alpha * sine * g + tangential * v - along * x
    dx = cosine * g - (2.0 * q * h * inverse) * x - along * v - share * du
    tl.store(grad_state + row * hidden + columns, dx.to(grad_state.dtype.element_ty), mask=inside)
    tl.store(grad_update + row * hidden + columns, du.to(grad_update.dtype.element_ty), mask=inside)
    if STEP_SIZE_LEARNED:
        tl.store(of_step_size + row, sine * grad_v + 2.0 * q * h / alpha)
    if SCALE_LEARNED:
        tl.store(of_scale + row, slope * (alpha * cosine * grad_v - q * sine * grad_x))
