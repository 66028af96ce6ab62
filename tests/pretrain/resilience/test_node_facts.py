"""Each fault is found and named by its node; nodes without fault pass."""

from dataclasses import replace
from typing import Any

import pytest

from pretrain.resilience.links import judge_links
from pretrain.resilience.node_facts import Facts, faults

GB = 10**9
GOOD = Facts(
    host="",
    versions={"torch": "2.13.0", "NCCL": "2.27"},
    gpus=8,
    gpus_given=8,
    gpu="H100",
    gpu_bytes=80 * 2**30,
    gpu_free=79 * 2**30,
    free={"/runs": 500 * GB, "/tmp": 100 * GB},
)


def nodes(**of_third: Any) -> list[Facts]:
    """Four nodes with two processes each; the third one as given."""
    return [replace(GOOD, host=f"node{i}", **(of_third if i == 3 else {})) for i in (1, 2, 3, 4) for _ in range(2)]


def test_good_nodes_pass() -> None:
    assert faults(nodes(), least_free=50 * GB) == []


@pytest.mark.parametrize(
    ("of_third", "line"),
    [
        ({"versions": {"torch": "2.12.0", "NCCL": "2.27"}}, "node3: torch 2.12.0, but 2.13.0 elsewhere"),
        ({"versions": {"torch": "2.13.0"}}, "node3: NCCL none, but 2.27 elsewhere"),
        ({"gpus": 7}, "node3: torch 2.13.0 sees 7 GPU(s) of 8"),
        ({"gpu": "A100"}, "node3: a GPU A100 with 80 GiB, but H100 with 80 GiB elsewhere"),
        ({"gpu_bytes": 40 * 2**30}, "node3: a GPU H100 with 40 GiB, but H100 with 80 GiB elsewhere"),
        ({"gpu_free": 60 * 2**30}, "node3: 20 GiB of a GPU's 80 GiB are taken already"),
        ({"free": {"/tmp": 2 * GB}}, "node3: only 2.0 GB free in /tmp, of 50.0 GB for two checkpoints"),
        ({"shared_fault": "run.dir=/runs is not shared"}, "node3: run.dir=/runs is not shared"),
        ({"skew_seconds": -7.0}, "node3: its clock is -7.0 s off; start its time service"),
    ],
)
def test_a_bad_node_is_named(of_third: dict[str, Any], line: str) -> None:
    assert faults(nodes(**of_third), least_free=50 * GB) == [line]


def test_what_is_wrong_everywhere_is_one_line() -> None:
    everywhere = [replace(facts, gpus=0, gpu="", gpu_bytes=0, gpu_free=0) for facts in nodes()]
    assert faults(everywhere, least_free=0) == ["all nodes: torch 2.13.0 sees 0 GPU(s) of 8"]


def test_without_a_batch_system_no_gpu_is_missed() -> None:
    alone = [replace(GOOD, host="laptop", gpus=0, gpus_given=None, gpu="", gpu_bytes=0, gpu_free=0)]
    assert faults(alone, least_free=0) == []


def test_a_slow_link_is_named() -> None:
    assert judge_links(["a", "b", "c", "d"], [0.01, 0.01, 0.05, 0.011], size=10**8) == [
        "c to d: 2.00 GB/s, but 9.52 GB/s between most nodes"
    ]
    assert judge_links(["a", "b", "c"], [0.01, 0.012, 0.02], size=10**8) == []
