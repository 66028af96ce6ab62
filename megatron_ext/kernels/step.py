"""What one step along the sphere is, for every implementation alike."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Retraction:
    """Which step along the sphere.

    Attributes:
        power: p > 0 of the family; inf is the exponential map.
        max_angle: largest angle of a step in radians; None leaves it free (the exponential map wraps round beyond pi).
        save: what the backward pass keeps beside the state: the ``update``, or the ``output``, which the next sublayer
            keeps anyway. ``output`` needs angles below :data:`megatron_ext.retraction.LARGEST_SAFE_ANGLE`, bounded by
            no less than :data:`megatron_ext.retraction.SMALLEST_SAFE_BOUND`, and a constant step size and scale.
    """

    power: float = math.inf
    max_angle: float | None = None
    save: Literal["update", "output"] = "update"


class Branch(NamedTuple):
    """A sublayer's output before it joins the stream.

    Attributes:
        output: [rows, hidden], any floating type.
        bias: [hidden], added to it.
        kept: dropout's mask after that, bool as `output`.
        dropout: share of the elements that it sets to zero.
    """

    output: Tensor
    bias: Tensor | None = None
    kept: Tensor | None = None
    dropout: float = 0.0


class Turn(NamedTuple):
    """How every row turns.

    Attributes:
        step_size: alpha; a tensor of one element in fp32 (fp64 for fp64 states) where it is learned.
        scale: of the angle, as `step_size`.
        retraction: the member of the family.
    """

    step_size: float | Tensor
    scale: float | Tensor
    retraction: Retraction


class Step(NamedTuple):
    """The new state [rows, hidden], and fp32 numbers of every row, [rows, 1], that the backward pass needs.

    Attributes:
        inverse: 1 / r^2; 0 for a row of zeros.
        share: <x, u> / r^2.
        q: beta^2.
    """

    state: Tensor
    inverse: Tensor
    share: Tensor
    q: Tensor


class StepGradients(NamedTuple):
    """Gradients of state and update [rows, hidden], and of the learned numbers, each a sum over the rows."""

    state: Tensor
    update: Tensor
    step_size: Tensor | None
    scale: Tensor | None
