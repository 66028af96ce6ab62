"""Fixtures that several test folders share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext import install_cpu_support
from tests.pretrain.runs import build_data


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set of real text."""
    return build_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def single_process() -> Iterator[None]:
    """One process that is its own tensor-, pipeline- and data-parallel group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    install_cpu_support()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.set_num_threads(threads)
