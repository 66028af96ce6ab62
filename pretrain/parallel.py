"""Process groups: start them, name this process's place in them, end them."""

import datetime
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext import ParallelSettings, install_cpu_support
from pretrain.deepspeed_compat import initialize_communication
from pretrain.launch import Launch


@dataclass(frozen=True)
class Place:
    """This process's place in the layout.

    Attributes:
        device: where its tensors live.
        global_rank, world_size: place in the whole job.
        tp_rank, pp_rank, dp_rank, cp_rank: place in each group; context-parallel ranks share a data-parallel rank.
        dp_size: number of data-parallel ranks, each of which takes samples of its own.
        cp_size: number of context-parallel ranks.
    """

    device: torch.device
    global_rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    dp_size: int
    cp_rank: int = 0
    cp_size: int = 1


def start(launch: Launch, parallel: ParallelSettings, seed: int, timeout_minutes: float = 10) -> Place:
    """Start the process groups: NCCL where there is CUDA, else gloo.

    Every collective that waits longer than ``timeout_minutes`` ends the process with an error.
    """
    cuda = torch.cuda.is_available()
    # Some launchers show each process its own GPU only, which then has index 0.
    device = torch.device("cuda", launch.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{launch.master_addr}:{launch.master_port}"
        if launch.launcher != "torchrun"
        else "env://",  # torchrun's agent already holds the store on that port
        rank=launch.global_rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        device_id=device if cuda else None,
    )
    initialize_communication("nccl" if cuda else "gloo", launch.local_rank)
    return arrange(device, parallel, seed)


def arrange(device: torch.device, parallel: ParallelSettings, seed: int) -> Place:
    """Lay Megatron's groups over the running world. May be called again after :func:`dissolve`."""
    install_cpu_support()
    parallel_state.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Place(
        device=device,
        global_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )


def reducing_group() -> dist.ProcessGroup:
    """The ranks that hold the same weights and have gradients of other tokens: data- and context-parallel ones."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def seed_step(place: Place, seed: int, step: int) -> None:
    """Start the random numbers of a training step (dropout's) as a function of the seed, the step and the place alone.

    So a run that goes on from a checkpoint in the same layout draws what it would have drawn, and no state is saved.
    Data- and context-parallel ranks and pipeline stages differ. Tensor-parallel ranks share the default stream and
    differ in Megatron-core's tracked one.
    """
    who = f"{place.dp_rank}/{place.pp_rank}" + (f"/{place.cp_rank}" if place.cp_size > 1 else "")
    digest = hashlib.sha256(f"{seed}/{step}/{who}".encode()).digest()
    tensor_parallel.model_parallel_cuda_manual_seed(int.from_bytes(digest[:7], "big"))


def dissolve() -> None:
    """Take Megatron's groups down and keep the world."""
    parallel_state.destroy_model_parallel()


def stop() -> None:
    """Wait for all ranks, then end the process groups."""
    dist.barrier()
    dissolve()
    dist.destroy_process_group()


class DeepSpeedMpu:
    """What DeepSpeed asks of ``mpu``: Megatron's parallel state plus three older names.

    Its data-parallel group has the context-parallel ranks too, over which gradients are reduced and ZeRO divides.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_rank(self) -> int:
        """Place in the tensor- and pipeline-parallel group."""
        return dist.get_rank(parallel_state.get_model_parallel_group())

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor- and pipeline-parallel group."""
        return dist.get_world_size(parallel_state.get_model_parallel_group())

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Those that :func:`reducing_group` names."""
        return reducing_group()

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.get_data_parallel_group().size()

    def get_data_parallel_rank(self) -> int:
        """This process's place among them."""
        return self.get_data_parallel_group().rank()

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of this process's data-parallel group."""
        return dist.get_process_group_ranks(self.get_data_parallel_group())


class AloneMpu(DeepSpeedMpu):
    """Shows each rank a data-parallel group of its own, so that DeepSpeed divides nothing; collective."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup = dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """This rank alone."""
        return self._group
