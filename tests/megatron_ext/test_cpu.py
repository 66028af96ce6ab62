"""These fail when a new Megatron-core changes what is replaced, so that the replacements are read again."""

import importlib
import importlib.metadata
import inspect

import pytest
import torch
from megatron.core import tensor_parallel

from megatron_ext import install_cpu_support
from megatron_ext.cpu import (
    FORK_REMARK,
    MEGATRON_VERSION,
    PATCHED_MODULES,
    RANDOM_STATE_FUNCTIONS,
)

RANDOM = "megatron.core.tensor_parallel.random"


def source(module: str) -> str:
    path = importlib.util.find_spec(module).origin
    with open(path) as file:
        return file.read()


def test_written_for_the_installed_megatron_core() -> None:
    assert importlib.metadata.version("megatron-core") == MEGATRON_VERSION


@pytest.mark.parametrize("module", PATCHED_MODULES)
def test_every_patched_module_still_asks_for_cuda(module: str) -> None:
    assert PATCHED_MODULES[module] in source(module)
    assert "import torch\n" in source(module)


@pytest.mark.parametrize("function", RANDOM_STATE_FUNCTIONS)
def test_the_replaced_functions_still_read_as_they_did(function: str) -> None:
    text = source(RANDOM)
    body = text[text.index(f"def {function}(") :]
    body = body[: body.index("\ndef ")]
    assert RANDOM_STATE_FUNCTIONS[function] in body


def test_the_replacements_take_the_arguments_of_the_originals() -> None:
    install_cpu_support()
    module = importlib.import_module(RANDOM)
    assert list(inspect.signature(module._get_cuda_rng_state).parameters) == ["device", "clone", "graph_safe"]
    assert list(inspect.signature(module._set_cuda_rng_state).parameters) == ["new_state", "device", "graph_safe"]
    text = source(RANDOM)
    assert "new_state: torch.Tensor, device: int = -1, graph_safe: bool = False" in text


def test_torch_itself_is_untouched() -> None:
    install_cpu_support()
    install_cpu_support()
    module = importlib.import_module("megatron.core.tensor_parallel.mappings")
    assert module.torch is not torch
    assert module.torch.cuda.current_device() == torch.device("cpu")
    assert module.torch.empty(2, device=module.torch.cuda.current_device()).device.type == "cpu"
    assert module.torch.zeros([], device="cuda").device.type == "cpu"
    assert module.torch.nn is torch.nn
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros([], device="cuda")


@pytest.mark.usefixtures("single_process")
def test_a_fork_of_the_random_states_has_a_stream_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """What dropout needs: other numbers inside the fork, and the outer stream as if nothing had been drawn."""
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    expected = torch.rand(6)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    before = torch.rand(3)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(3)
    after = torch.rand(3)
    assert torch.equal(torch.cat([before, after]), expected)
    assert not torch.equal(inside, expected[3:])
    with tensor_parallel.get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), inside)
    assert FORK_REMARK in source(RANDOM)
    assert not caplog.records
