"""The parts of :mod:`megatron_ext.kernels.eager`, each compiled by torch.compile for the CPU or a GPU.

Rows may be of any number: a part is compiled for a number left open, so whatever runs first, training or evaluation,
before or after a restart, the same code computes the same bits. Compiled code is kept in TORCHINDUCTOR_CACHE_DIR.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch.utils._pytree import tree_leaves

from megatron_ext.kernels import eager
from megatron_ext.kernels.rows import PARTS, RowKernels
from megatron_ext.kernels.step import Branch

_OPTIONS: dict[str, Any] = {
    # As many threads as torch has when the code runs, not when it was compiled.
    "cpp.dynamic_threads": True,
    # A product may go into a sum unrounded.
    "cpp.enable_floating_point_contract_flag": "fast",
}


class Part:
    """A part that is compiled at its first call.

    It is handed dense tensors without a graph, so that neither strides nor requires_grad ask for code of their own.
    """

    def __init__(self, part: Callable[..., Any]) -> None:
        self._compiled = torch.compile(part, fullgraph=True, options=_OPTIONS)
        self._seen: set[Any] = set()

    def __call__(self, *arguments: Any) -> Any:
        """As the eager part; raises InductorError where there is no compiler."""
        dense = [_dense(argument) for argument in arguments]
        matrices = [tensor for tensor in tree_leaves(dense) if isinstance(tensor, Tensor) and tensor.dim() > 1]
        kind = tuple((tensor.dtype, tensor.shape[1]) for tensor in matrices)
        if kind not in self._seen and matrices[0].shape[0] > 1:
            self._seen.add(kind)
            for tensor in matrices:
                torch._dynamo.mark_dynamic(tensor, 0)
        return self._compiled(*dense)


@cache
def kernels() -> RowKernels:
    """All parts."""
    return RowKernels(**{name: Part(getattr(eager, name)) for name in PARTS})


def why_not_compile(device: torch.device) -> str | None:
    """What keeps torch.compile from working here, in one line; None if it works."""
    probe = torch.compile(lambda x: x.sin() + 1)
    try:
        with inductor.patch(force_disable_caches=True):  # else a cached result would hide a missing compiler
            probe(torch.zeros(16, device=device))
    except (InductorError, TorchDynamoException) as error:
        return str(error).strip().splitlines()[0]
    return None


def _dense(argument: Any) -> Any:
    if isinstance(argument, Branch):
        return Branch(_dense(argument.output), _dense(argument.bias), _dense(argument.kept), argument.dropout)
    return argument.detach().contiguous() if isinstance(argument, Tensor) else argument
