"""The operations beside attention and matrix products, each with its gradients, in up to three implementations.

``eager`` is the reference, in torch's operations. ``compiled`` is the same by torch.compile; it needs a C++ compiler on
a CPU. ``triton`` is one kernel forward and one backward, for NVIDIA's GPUs. ``auto`` takes the best of a device.
"""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_ext.kernels import compiled, eager
from megatron_ext.kernels.rows import PARTS, RowKernels
from megatron_ext.kernels.step import Branch, Step, StepGradients, Turn

Choice = Literal["auto", "eager", "compiled", "triton"]
"""The values of `ModelSettings.kernels`."""


class Kernels(Protocol):
    """One implementation; see :class:`megatron_ext.kernels.rows.RowKernels` and :mod:`megatron_ext.kernels.eager`."""

    def step(self, state: Tensor, branch: Branch, turn: Turn) -> Step:
        """A step along the sphere."""

    def step_back(
        self,
        grad: Tensor,
        state: Tensor,
        known: Branch,
        numbers: tuple[Tensor, Tensor, Tensor],
        turn: Turn,
        learned: tuple[bool, bool],
    ) -> StepGradients:
        """Its gradients."""

    def swiglu(self, gate_and_value: Tensor, /) -> Tensor:
        """silu(gate) value."""

    def swiglu_back(self, grad: Tensor, gate_and_value: Tensor, /) -> Tensor:
        """Its gradient."""


EAGER = eager.Eager(**{name: getattr(eager, name) for name in PARTS})
"""The reference."""


def resolve(choice: Choice, device_type: str) -> tuple[Choice, str | None]:
    """What a choice comes to on a kind of device: an implementation's name, and why not what was wished for, if so.

    Args:
        choice: as set.
        device_type: "cpu", "cuda" or "meta", where nothing is computed.

    Raises:
        ValueError: `triton` cannot run there; one line that says what to change.
    """
    if choice == "triton" and (reason := _why_not_triton(device_type)):
        raise ValueError(f"kernels=triton: {reason}; set auto, compiled or eager")
    if choice == "auto":
        choice = "triton" if device_type == "cuda" and not _why_not_triton(device_type) else "eager"
    if choice == "compiled" and device_type != "meta" and (reason := _why_not_compile(device_type)):
        return "eager", f"kernels=compiled: torch.compile does not work here ({reason}); eager is used instead"
    return choice, None


def kernels_of(choice: Choice, tensor: Tensor) -> Kernels:
    """The implementation for a tensor. Always eager: fp64, the meta device, and where torch.compile traces the code
    around, which then fuses these operations with their neighbours itself.

    Raises:
        ValueError: as :func:`resolve`.
    """
    if tensor.device.type == "meta" or tensor.dtype == torch.float64 or torch.compiler.is_compiling():
        return EAGER
    return _implementation(choice, tensor.device.type)


def row_kernels_of(choice: Choice, tensor: Tensor) -> RowKernels:
    """As :func:`kernels_of`, for operations of which there is no Triton kernel."""
    kernels = kernels_of(choice, tensor)
    return kernels if isinstance(kernels, RowKernels) else EAGER


@cache
def _implementation(choice: Choice, device_type: str) -> Kernels:
    name, reason = resolve(choice, device_type)
    if reason:
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    if name == "triton":
        from megatron_ext.kernels import fused  # late: Triton is not everywhere

        return fused.TritonKernels()
    return compiled.kernels() if name == "compiled" else EAGER


@cache
def _why_not_compile(device_type: str) -> str | None:
    return compiled.why_not_compile(torch.device(device_type))


def _why_not_triton(device_type: str) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if device_type in ("cuda", "meta") or interpreted else f"Triton does not run on {device_type}"


__all__ = ["EAGER", "Branch", "Choice", "Kernels", "Step", "StepGradients", "Turn", "kernels_of", "resolve"]
