"""The parts of :mod:`megatron_ext.kernels.eager`, each compiled by torch.compile for the CPU or a GPU.

Rows may be of any number: a part is compiled for a number left open, so whatever runs first, training or evaluation,
before or after a restart, the same code computes the same bits. Compiled code is kept in TORCHINDUCTOR_CACHE_DIR.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

from megatron_ext.kernels import eager
from megatron_ext.kernels.rows import PARTS, RowKernels
from megatron_ext.kernels.step import Branch, Turn

_OPTIONS: dict[str, Any] = {
    # As many threads as torch has when the code runs, not when it was compiled.
    "cpp.dynamic_threads": True,
    # A product may go into a sum unrounded.
    "cpp.enable_floating_point_contract_flag": "fast",
}
_CONSTANTS: dict[str, Any] = {
    # Else the numbers of a second member would become variables of the code,
    "specialize_float": True,
    # a second width would make one of every width,
    "automatic_dynamic_shapes": False,
    # and a ninth kind of arguments would be an error.
    "recompile_limit": 1024,
}


class Part:
    """A part that is compiled at its first call with a kind of arguments.

    It is handed dense tensors without a graph, so that neither strides nor requires_grad ask for code of their own. The
    member of the family is a constant of the code; step sizes and scales, which differ between layers, are not.
    """

    def __init__(self, part: Callable[..., Any]) -> None:
        self._compiled = torch.compile(part, fullgraph=True, options=_OPTIONS)
        self._seen: set[Any] = set()

    def __call__(self, *arguments: Any) -> Any:
        """As the eager part; raises InductorError where there is no compiler."""
        device = arguments[0].device
        dense = [_dense(argument, device) for argument in arguments]
        leaves = list(_leaves(dense))
        kind = (device, *_state_of_torch(device.type), *map(_kind, leaves))
        if kind in self._seen:
            return self._compiled(*dense)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and len(leaf) > 1:
                torch._dynamo.mark_dynamic(leaf, 0)
        with torch._dynamo.config.patch(_CONSTANTS):
            results = self._compiled(*dense)
        self._seen.add(kind)
        return results


@cache
def kernels() -> RowKernels:
    """All parts."""
    return RowKernels(**{name: Part(getattr(eager, name)) for name in PARTS})


def why_not_compile(device: torch.device) -> str | None:
    """What keeps torch.compile from working here, in one line; None if it works.

    That may be a missing compiler, or a folder for its results, TORCHINDUCTOR_CACHE_DIR, that cannot be written to.
    """
    probe = torch.compile(lambda x: x.sin() + 1)
    try:
        # Else a result that is there already would hide a missing compiler. It goes when the block ends well, so
        # whatever goes wrong is caught within.
        with fresh_cache(dir=cache_dir()):
            return _failure_of(probe, torch.zeros(16, device=device))
    except OSError as error:
        return str(error)


def _failure_of(probe: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    try:
        probe(x)
    except (InductorError, TorchDynamoException) as error:
        return str(error).strip().splitlines()[0]
    return None


def _state_of_torch(device_type: str) -> tuple[Any, ...]:
    """What torch compiles anew for, beside arguments."""
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _dense(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, Branch):
        output, bias, kept = (_dense(tensor, device) for tensor in argument[:3])
        return Branch(output, bias, kept, argument.dropout)
    if isinstance(argument, Turn):
        step_size, scale = (_number(number, device) for number in (argument.step_size, argument.scale))
        return Turn(step_size, scale, argument.retraction)
    return argument.detach().contiguous() if isinstance(argument, Tensor) else argument


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """What stands in tuples in tuples; torch's own pytree takes several times as long."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _leaves(argument)
        else:
            yield argument


def _kind(leaf: Any) -> Any:
    """What of an argument torch.compile makes code for; of a number of rows only whether it is none, one or more."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dtype, min(leaf.shape[0], 2), leaf.shape[-1], leaf.is_inference()


def _number(value: float | Tensor, device: torch.device) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.full((1,), value, dtype=torch.float32, device=device)
