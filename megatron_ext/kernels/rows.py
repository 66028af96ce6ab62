"""A step along the sphere and its exact gradients from row-wise parts, which may be eager or compiled."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from megatron_ext.kernels.step import Branch, Step, StepGradients, Turn


@dataclass(frozen=True)
class RowKernels:
    """One implementation; each part is as the function of its name in :mod:`megatron_ext.kernels.eager`.

    A part ends where every number of a row must be known before the next pass over the row.
    """

    turn: Callable[..., tuple[Tensor, ...]]
    combine: Callable[..., Tensor]
    turn_back: Callable[..., tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]]
    combine_back: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., tuple[Tensor, Tensor]]
    norm_back: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    swiglu_back: Callable[..., Tensor]

    def step(self, state: Tensor, branch: Branch, turn: Turn) -> Step:
        """The step of :func:`megatron_ext.retract`, from a state [rows, hidden]."""
        inverse, share, q, of_state, of_update = self.turn(state, branch, turn)
        return Step(self.combine(state, branch, of_state, of_update), inverse, share, q)

    def step_back(
        self,
        grad: Tensor,
        state: Tensor,
        known: Branch,
        numbers: tuple[Tensor, Tensor, Tensor],
        turn: Turn,
        learned: tuple[bool, bool],
    ) -> StepGradients:
        """The gradients of :meth:`step`; for the arguments see :func:`megatron_ext.kernels.eager.turn_back`."""
        weights, *of_rows = self.turn_back(grad, state, known, numbers, turn, learned)
        of_state, of_update = self.combine_back(grad, state, known, weights)
        return StepGradients(of_state, of_update, *(None if rows is None else rows.sum() for rows in of_rows))


PARTS = tuple(field.name for field in fields(RowKernels))
"""The names of the parts."""
