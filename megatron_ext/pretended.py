"""A model on the meta device as one rank of a job that does not exist: its code runs, and nothing is computed.

Sizes of parameters and of whatever a training step keeps can then be read off the real code, for any scheme, any layout
and any size, in a fraction of a second and without memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.cpu import install_cpu_support
from megatron_ext.settings import ParallelSettings

Target = Literal["cuda", "cpu"]
"""Whose kernels are pretended: they keep different things for the backward pass."""


@contextlib.contextmanager
def pretended_rank(parallel: ParallelSettings, pp_rank: int = 0) -> Iterator[None]:
    """Make this process tensor- and context-parallel rank 0 of a pipeline stage, alone in its data-parallel group.

    The other ranks do not exist; collectives return at once, with whatever is in their buffers. Afterwards no process
    group, no parallel state and no random state is left behind.

    Raises:
        RuntimeError: process groups run already.
    """
    if dist.is_initialized():
        raise RuntimeError("process groups run already; a layout can be pretended only where there are none")
    with torch.random.fork_rng(devices=[]):
        world_size, global_rank = parallel.ranks_of_a_replica, parallel.tp * parallel.cp * pp_rank
        dist.init_process_group("fake", store=FakeStore(), rank=global_rank, world_size=world_size)
        try:
            install_cpu_support()
            parallel_state.initialize_model_parallel(
                parallel.tp, parallel.pp, context_parallel_size=parallel.cp, create_gloo_process_groups=False
            )
            tensor_parallel.model_parallel_cuda_manual_seed(0)
            yield
        finally:
            tensor_parallel.get_cuda_rng_tracker().reset()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


class OnMeta(TorchFunctionMode):
    """Make every new tensor on the meta device, and keep for the backward pass what the target's kernels would keep."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.kernels = KERNELS[target]

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        if function is torch.autograd.backward:
            with self:  # a mode is off while it answers, and the backward pass makes tensors too
                return _backward(*arguments, **named)
        if named.get("device") is not None:
            named["device"] = "meta"
        if function is torch.Tensor.to and len(arguments) > 1 and isinstance(arguments[1], (torch.device, str, int)):
            arguments = (arguments[0], "meta", *arguments[2:])
        return self.kernels.get(function, function)(*arguments, **named)


def _backward(tensors: Any, grad_tensors: Any = None, **usual: Any) -> None:
    """torch.autograd.backward with its usual settings, without asking the mode again."""
    outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors
    upstream = tuple(torch.ones_like(output) for output in outputs) if given is None else tuple(given)
    torch.autograd.graph._engine_run_backward(
        outputs, upstream, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _FusedAttention(torch.autograd.Function):
    """What flash attention keeps: its inputs, its output, and one fp32 number for each query of each head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _FusedRMSNorm(torch.autograd.Function):
    """What torch's RMSNorm on a GPU and ours on a CPU keep: the input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(states, gain, states.new_empty((*states.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Any:
    return _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Any:
    """Fused, except with dropout: then on meta as on the CPU whole attention matrices are made."""
    if named.get("dropout_p"):
        return F.scaled_dot_product_attention(query, key, value, **named)
    return _fused_attention(query, key, value)


def _fused_rms_norm(states: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Any:
    return _FusedRMSNorm.apply(states, weight)  # type: ignore[no-untyped-call]


KERNELS: Mapping[Target, Mapping[Any, Callable[..., Any]]] = {
    "cuda": {F.scaled_dot_product_attention: _fused_attention, F.rms_norm: _fused_rms_norm},
    "cpu": {F.scaled_dot_product_attention: _attention_on_cpu, F.rms_norm: _fused_rms_norm},
}
"""By target, the functions whose own code on the meta device keeps something else than the target's kernel."""
