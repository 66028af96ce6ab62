"""The Triton kernels behind the interface of all kernels.

Tried in Triton's interpreter alone so far: no GPU has run them.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_ext.kernels import triton_step, triton_swiglu
from megatron_ext.kernels.step import Branch, Step, StepGradients, Turn

WIDEST_ROW = 16384
"""Elements of a row that a kernel holds at once."""

_SWIGLU_BLOCK = 1024


class TritonKernels:
    """One kernel forward and one backward for each operation; see :class:`megatron_ext.kernels.Kernels`."""

    def step(self, state: Tensor, branch: Branch, turn: Turn) -> Step:
        """As :meth:`megatron_ext.kernels.rows.RowKernels.step`.

        Raises:
            ValueError: rows wider than :data:`WIDEST_ROW`.
        """
        rows, hidden = state.shape
        new_state = torch.empty_like(state, memory_format=torch.contiguous_format)
        numbers = [state.new_empty((rows, 1), dtype=torch.float32) for _ in range(3)]
        triton_step.forward[(rows,)](
            *_strided(state),
            *_of_branch(branch, state),
            *_of_turn(turn),
            new_state,
            *numbers,
            hidden,
            **_constants(hidden, branch.bias, branch.kept, turn),
        )
        return Step(new_state, *numbers)

    def step_back(
        self,
        grad: Tensor,
        state: Tensor,
        known: Branch,
        numbers: tuple[Tensor, Tensor, Tensor],
        turn: Turn,
        learned: tuple[bool, bool],
    ) -> StepGradients:
        """As :meth:`megatron_ext.kernels.rows.RowKernels.step_back`; sums over rows are always taken in one order."""
        rows, hidden = state.shape
        grad_state = torch.empty_like(state, memory_format=torch.contiguous_format)
        grad_update = torch.empty_like(known.output, memory_format=torch.contiguous_format)
        of_numbers = [state.new_empty(rows, dtype=torch.float32) if wanted else state for wanted in learned]
        triton_step.backward[(rows,)](
            *_strided(grad),
            *_strided(state),
            *_of_branch(known, state),
            *_of_turn(turn),
            *numbers,
            grad_state,
            grad_update,
            *of_numbers,
            hidden,
            **_constants(hidden, known.bias, known.kept, turn),
            STEP_SIZE_LEARNED=learned[0],
            SCALE_LEARNED=learned[1],
            OUTPUT_SAVED=turn.retraction.save == "output",
        )
        sums = (part.sum() if wanted else None for part, wanted in zip(of_numbers, learned, strict=True))
        return StepGradients(grad_state, grad_update, *sums)

    def swiglu(self, gate_and_value: Tensor, /) -> Tensor:
        """As :func:`megatron_ext.kernels.eager.swiglu`, rounded once."""
        hidden = gate_and_value.contiguous()
        rows, width = hidden.shape[0], hidden.shape[1] // 2
        result = hidden.new_empty(rows, width)
        triton_swiglu.forward[(rows, triton.cdiv(width, _SWIGLU_BLOCK))](hidden, result, width, BLOCK=_SWIGLU_BLOCK)
        return result

    def swiglu_back(self, grad: Tensor, gate_and_value: Tensor, /) -> Tensor:
        """As :func:`megatron_ext.kernels.eager.swiglu_back`, rounded once."""
        grad, hidden = grad.contiguous(), gate_and_value.contiguous()
        rows, width = grad.shape
        result = torch.empty_like(hidden)
        grid = (rows, triton.cdiv(width, _SWIGLU_BLOCK))
        triton_swiglu.backward[grid](grad, hidden, result, width, BLOCK=_SWIGLU_BLOCK)
        return result


def _strided(tensor: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows lie anywhere, but each in one piece, and the distance of the rows."""
    tensor = tensor if tensor.stride(1) == 1 else tensor.contiguous()
    return tensor, tensor.stride(0)


def _of_branch(branch: Branch, unused: Tensor) -> tuple[Any, ...]:
    """Arguments of a kernel; `unused` stands where there is nothing to read."""
    bias = unused if branch.bias is None else branch.bias.contiguous()
    kept = unused if branch.kept is None else branch.kept.contiguous().view(torch.uint8)
    return (*_strided(branch.output), bias, kept, 1 / (1 - branch.dropout))


def _of_turn(turn: Turn) -> tuple[Any, Any]:
    return turn.step_size, turn.scale


def _constants(hidden: int, bias: Tensor | None, kept: Tensor | None, turn: Turn) -> dict[str, Any]:
    if hidden > WIDEST_ROW:
        raise ValueError(f"kernels=triton: rows of {hidden} are wider than {WIDEST_ROW}; set compiled or eager")
    power, bound = turn.retraction.power, turn.retraction.max_angle
    block = triton.next_power_of_2(hidden)
    return {
        "bound": bound or 0.0,
        "cos_bound": math.cos(bound or 0.0),
        "sin_bound": math.sin(bound or 0.0),
        "BLOCK": block,
        "POWER": 0.0 if power == math.inf else float(power),
        "FREE": bound is None,
        "BIAS": bias is not None,
        "DROP": kept is not None,
        "STEP_SIZE_IS_TENSOR": isinstance(turn.step_size, Tensor),
        "SCALE_IS_TENSOR": isinstance(turn.scale, Tensor),
        "num_warps": min(max(block // 256, 1), 16),
    }
