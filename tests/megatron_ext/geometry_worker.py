"""One of two ranks: the geometry of every case in every layout of two processes, saved as each rank saw it.

Usage: python -m tests.megatron_ext.geometry_worker FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext import Geometry, GeometryProbe, ModelSettings, ParallelSettings, install_cpu_support
from megatron_ext.context import own_part
from tests.megatron_ext import small

LAYOUTS = {
    "dp2": ParallelSettings(),
    "tp2": ParallelSettings(tp=2),
    "tp2 sp": ParallelSettings(tp=2, sp=True),
    "pp2": ParallelSettings(pp=2),
    "cp2": ParallelSettings(cp=2),
}
CASES = {
    "geonorm": small.settings(residual={"learn_alpha": True, "alpha": 2.0, "clamp": 0.4}),
    "geonorm, recomputed": small.settings(residual={"learn_alpha": True, "alpha": 2.0, "clamp": 0.4}, recompute="full"),
    "pre_norm": small.settings("pre_norm"),
    "ngpt_lerp": small.settings("ngpt_lerp"),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    install_cpu_support()
    for layout, parallel in LAYOUTS.items():
        parallel_state.initialize_model_parallel(parallel.tp, parallel.pp, context_parallel_size=parallel.cp)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        results = {case: vars(geometry(model, parallel, dp_rank, dp_size)) for case, model in CASES.items()}
        torch.save(results, folder / f"{layout} {dist.get_rank()}.pt")
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def geometry(model: ModelSettings, parallel: ParallelSettings, dp_rank: int = 0, dp_size: int = 1) -> Geometry:
    """Of forward and backward over this data-parallel rank's sequences of the batch, one micro batch each."""
    stage = small.build(model, parallel)
    cp_rank = parallel_state.get_context_parallel_rank()
    tokens, labels, positions = (own_part(tensor, cp_rank, parallel.cp) for tensor in small.batch()[:3])
    mine = range(dp_rank, small.BATCH, dp_size)

    def forward_step(data: Any, chunk: Any) -> tuple[Tensor, Any]:
        index = next(data)
        row = slice(index, index + 1)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return output.sum(), torch.tensor(output.numel(), dtype=torch.int), {}

        return chunk(tokens[row], positions[row], None, labels=labels[row]), loss

    probe = GeometryProbe(stage)
    with probe.recording():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine),
            model=stage,
            num_microbatches=len(mine),
            seq_length=small.SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
    return probe.reduce()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
