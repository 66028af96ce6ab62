"""Two ranks: prints the bytes that a real forward pass saves: tp without and with sp, and cp."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext import ParallelSettings, install_cpu_support
from tests.megatron_ext import small
from tests.megatron_ext.counted import saved_bytes


def main() -> None:
    dist.init_process_group("gloo")
    install_cpu_support()
    for layout in (ParallelSettings(tp=2), ParallelSettings(tp=2, sp=True), ParallelSettings(cp=2)):
        parallel_state.initialize_model_parallel(layout.tp, context_parallel_size=layout.cp)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        print(saved_bytes(small.settings(num_layers=3), layout, 2, torch.bfloat16))
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
