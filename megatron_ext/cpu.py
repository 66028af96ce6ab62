"""Megatron-core on the CPU with gloo, and the one place where anything of Megatron-core is replaced.

Written for megatron-core 0.16.1. Megatron-core names CUDA where it means "the device": it allocates buffers on
`torch.cuda.current_device()` or `device="cuda"`, synchronises, and keeps random states of the CUDA generator. In the
modules listed in `PATCHED_MODULES` the global name `torch` is replaced by a stand-in that answers for the CPU; torch
itself, and every other package, stays untouched. Where CUDA is available nothing is done.
"""

import importlib
import logging
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MEGATRON_VERSION = "0.16.1"
"""The version whose sources the lists below were read from."""

_CURRENT_DEVICE = "device=torch.cuda.current_device()"

PATCHED_MODULES: dict[str, str] = {
    # Buffers of gathered sequences, logits and gradients.
    "megatron.core.tensor_parallel.mappings": _CURRENT_DEVICE,
    "megatron.core.tensor_parallel.layers": _CURRENT_DEVICE,
    "megatron.core.tensor_parallel.utils": _CURRENT_DEVICE,
    "megatron.core.utils": _CURRENT_DEVICE,
    # Moves the rotary frequencies at the first forward pass.
    "megatron.core.models.common.embeddings.rotary_pos_embedding": _CURRENT_DEVICE,
    # Counts tokens on the device.
    "megatron.core.pipeline_parallel.schedules": 'torch.zeros([], dtype=torch.int, device="cuda")',
    # Receives states and gradients, then synchronises.
    "megatron.core.pipeline_parallel.p2p_communication": _CURRENT_DEVICE,
    # Seeds and saves the random states behind dropout and recomputation.
    "megatron.core.tensor_parallel.random": "torch.cuda.manual_seed(data_parallel_seed)",
}
"""Every module whose `torch` is replaced, with a piece of its source that makes this necessary."""

RANDOM_STATE_FUNCTIONS: dict[str, str] = {
    "_get_cuda_rng_state": "return torch.cuda.random.get_rng_state(device=device)",
    # Without CUDA torch queues the change for ever: a fork of the random states would silently do nothing.
    "_set_cuda_rng_state": "_lazy_call(cb)",
}
"""Functions of megatron.core.tensor_parallel.random that are replaced, with a piece of their source."""

FORK_REMARK = "CPU RNG state changed within GPU RNG context"
"""What a fork of the random states says when the CPU's generator was used: here always, and rightly."""

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor")


def install_cpu_support() -> None:
    """Let Megatron-core run on the CPU in this process; call it before building a model. Without effect with CUDA."""
    if torch.cuda.is_available():
        return
    stand_in = _torch_on_cpu()
    for name in PATCHED_MODULES:
        importlib.import_module(name).torch = stand_in  # type: ignore[attr-defined]
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    replacements = {"_get_cuda_rng_state": _get_random_state, "_set_cuda_rng_state": _set_random_state}
    for name in RANDOM_STATE_FUNCTIONS:
        setattr(random, name, replacements[name])
    logging.getLogger(random.__name__).addFilter(_is_not_about_one_generator)


def _is_not_about_one_generator(record: logging.LogRecord) -> bool:
    return record.msg != FORK_REMARK


class _Fallback(ModuleType):
    """A module that has its own attributes and, for everything else, those of another module."""

    def __init__(self, original: ModuleType, **attributes: Any) -> None:
        super().__init__(original.__name__)
        self._original = original
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _torch_on_cpu() -> ModuleType:
    cuda = _Fallback(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda device=None: None,
        manual_seed=torch.manual_seed,
        get_rng_state=_get_random_state,
        set_rng_state=_set_random_state,
        random=SimpleNamespace(get_rng_state=_get_random_state, set_rng_state=_set_random_state),
    )
    return _Fallback(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def make(*arguments: Any, **named: Any) -> Tensor:
        if named.get("device") == "cuda":
            named["device"] = _CPU
        return factory(*arguments, **named)

    return make


def _get_random_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_random_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)
