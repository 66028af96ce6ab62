"""How fast processes can talk to one another; on running process groups."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

ROUNDS = 5
SLOW_SHARE = 1 / 3
"""Of the median link's bandwidth: slower ones are named."""
ENOUGH_LINKS = 3
"""With fewer, there is no telling which one is slow."""


def all_reduce_gigabytes(local_rank: int) -> float:
    """Bus bandwidth of an all-reduce over all processes, 10^9 bytes a second; collective.

    As nccl-tests counts it: bytes x 2 (n - 1) / n / seconds, with the median of the seconds. 0 for one process.
    """
    if dist.get_world_size() == 1:
        return 0.0
    buffer = _buffer(local_rank)
    seconds = statistics.median(_timed(lambda: dist.all_reduce(buffer)) for _ in range(ROUNDS))
    n = dist.get_world_size()
    return buffer.nbytes * 2 * (n - 1) / n / seconds / 1e9


def slow_links(hosts: Sequence[str], local_rank: int) -> list[str]:
    """A line for every link from a node to the next one that is far slower than the others; collective.

    Args:
        hosts: of all global ranks, in their order.
    """
    leaders = [hosts.index(name) for name in dict.fromkeys(hosts)]
    if len(leaders) < ENOUGH_LINKS:
        return []
    buffer = _buffer(local_rank)
    seconds = torch.zeros(len(leaders), dtype=torch.float64, device=buffer.device)
    for link in range(len(leaders)):
        here, there = leaders[link], leaders[(link + 1) % len(leaders)]
        dist.barrier()  # one link at a time
        if dist.get_rank() == here:
            send = partial(dist.send, buffer, there)
            seconds[link] = statistics.median(_timed(send) for _ in range(ROUNDS))
        elif dist.get_rank() == there:
            for _ in range(ROUNDS):
                dist.recv(buffer, here)
    dist.all_reduce(seconds)
    return judge_links([hosts[leader] for leader in leaders], seconds.tolist(), buffer.nbytes)


def judge_links(nodes: Sequence[str], seconds: Sequence[float], size: int) -> list[str]:
    """A line for every slow link; ``seconds[i]`` is what ``size`` bytes take from ``nodes[i]`` to the next one."""
    median = statistics.median(seconds)
    following = [*nodes[1:], nodes[0]]
    return [
        f"{here} to {there}: {size / taken / 1e9:.2f} GB/s, but {size / median / 1e9:.2f} GB/s between most nodes"
        for here, there, taken in zip(nodes, following, seconds, strict=True)
        if median < SLOW_SHARE * taken
    ]


def _buffer(local_rank: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.zeros(2**26, device=torch.device("cuda", local_rank % torch.cuda.device_count()))
    return torch.zeros(2**20)


def _timed(action: Callable[[], object]) -> float:
    _wait_for_device()
    started = time.perf_counter()
    action()
    _wait_for_device()
    return time.perf_counter() - started


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
