"""A step along the sphere and its exact gradients from row-wise parts, which may be eager or compiled.

The parts run over the hidden width; what lies between them are few numbers of every row, computed here one by one in
torch. So one set of compiled parts serves every member of the family, every step size and every clamp.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_ext.angle import Angle, angle_of, slope_in_scale
from megatron_ext.kernels.step import Branch, Step, StepGradients, Turn


@dataclass(frozen=True)
class RowKernels:
    """One implementation; each part is as the function of its name in :mod:`megatron_ext.kernels.eager`."""

    measure: Callable[..., tuple[Tensor, Tensor, Tensor]]
    combine: Callable[..., Tensor]
    measure_back: Callable[..., tuple[Tensor, Tensor, Tensor]]
    combine_back: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., tuple[Tensor, Tensor]]
    norm_back: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    swiglu_back: Callable[..., Tensor]

    def step(self, state: Tensor, branch: Branch, turn: Turn) -> Step:
        """The step of :func:`megatron_ext.retract`, from a state [rows, hidden]."""
        inverse, share, squared_tangent = self.measure(state, branch)
        q = turn.step_size**2 * squared_tangent * inverse
        angle = _angle_of_live_rows(q, turn, inverse)
        of_update = turn.step_size * angle.sine
        new_state = self.combine(state, branch, angle.cosine - of_update * share, of_update)
        return Step(new_state, inverse, share, q)

    def step_back(
        self,
        grad: Tensor,
        state: Tensor,
        known: Branch,
        numbers: tuple[Tensor, Tensor, Tensor],
        turn: Turn,
        learned: tuple[bool, bool],
    ) -> StepGradients:
        """The gradients of :meth:`step`, derived in residual form: G = dL/dv, h = dL/dq.

        Args:
            grad: of the new state.
            state: the old one.
            known: what the step was given, or with save=output the new state alone.
            numbers: inverse, share and q of the step.
            turn: of the step.
            learned: whether the step size, and the angle scale, wants a gradient.
        """
        (inverse, share, q), alpha = numbers, turn.step_size
        angle = _angle_of_live_rows(q, turn, inverse)
        sine = alpha * angle.sine
        if turn.retraction.save == "update":
            of_known, of_state = torch.ones_like(q), share
        else:  # v = (y - C x) / (alpha S)
            of_known = torch.where(inverse > 0, 1 / sine, 0.0)
            of_state = of_known * angle.cosine
        grad_x, grad_v, x_v = self.measure_back(grad, state, known, of_known, of_state)
        # Through C and S; q depends on v and on r.
        h = angle.cosine_slope * grad_x + alpha * angle.sine_slope * grad_v
        # G = sine g + tangential v; v depends on u and, through the projection, on x.
        tangential = 2 * alpha**2 * h * inverse
        along = (sine * grad_x + tangential * x_v) * inverse
        grad_state, grad_update = self.combine_back(
            *(grad, state, known, of_known, of_state),
            *(angle.cosine, sine, 2 * q * h * inverse, tangential, along, share),
        )
        grad_alpha = grad_scale = None
        if learned[0]:
            grad_alpha = (angle.sine * grad_v + 2 * q * h / alpha).sum()
        if learned[1]:
            # dC/ds = -sin(theta) phi and dS/ds = cos(theta) phi / beta, where the angle still grows.
            slope = slope_in_scale(q, turn.retraction.power, turn.scale, turn.retraction.max_angle)
            grad_scale = (slope * (alpha * angle.cosine * grad_v - q * angle.sine * grad_x)).sum()
        return StepGradients(grad_state, grad_update, grad_alpha, grad_scale)


PARTS = tuple(field.name for field in fields(RowKernels))
"""The names of the parts."""


def _angle_of_live_rows(q: Tensor, turn: Turn, inverse: Tensor) -> Angle:
    """C, S and their slopes, with C = S = 0 in the rows of zeros: neither a value nor a gradient passes there."""
    angle = angle_of(q, turn.retraction.power, turn.scale, turn.retraction.max_angle)
    live = (inverse > 0).to(q.dtype)
    return angle._replace(cosine=live * angle.cosine, sine=live * angle.sine)
