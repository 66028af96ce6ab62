"""Two tensor-parallel ranks: prints the bytes that a real forward pass saves, without and with sequence parallelism."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext import ParallelSettings, install_cpu_support
from tests.megatron_ext import small
from tests.megatron_ext.counted import saved_bytes


def main() -> None:
    dist.init_process_group("gloo")
    install_cpu_support()
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for sp in (False, True):
        print(saved_bytes(small.settings(num_layers=3), ParallelSettings(tp=2, sp=sp), 2, torch.bfloat16))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
