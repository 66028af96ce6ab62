"""Throughput, golden values of published runs, and the names that GPUs give themselves."""

import time

import pytest
import torch

from megatron_ext import ModelSettings
from megatron_ext.flops import flops_per_token
from pretrain.hardware import GPUS, gpu_named
from pretrain.monitor.phases import Phases
from pretrain.monitor.throughput import Throughput, memory_in_use


def test_mfu_of_palm_540b_as_published() -> None:
    """Table 3 and appendix B of arXiv 2204.02311: 238.3 k tokens/s on 6144 TPU v4 of 275 TFLOP/s are 46.2 %."""
    flops = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    values = Throughput(flops, 6144, 275).values(238.3e3)
    assert values["throughput/mfu"] == pytest.approx(0.462, abs=0.001)


def test_model_flops_of_gpt3_by_hand() -> None:
    """96 layers x 12288, sequence 2048 (arXiv 2005.14165): 12 L H^2 parameters in the layers and H V in the head."""
    gpt3 = ModelSettings(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        ffn_hidden_size=4 * 12288,
        activation="gelu",
        sequence_length=2048,
        vocab_size=50257,
    )
    parameters = 12 * 96 * 12288**2 + 12288 * 50257
    assert parameters == pytest.approx(174.6e9, rel=1e-3)
    assert flops_per_token(gpt3).model == 6 * parameters + 12 * 96 * 12288 * 2048


def test_mfu_of_megatron_lm_as_published() -> None:
    """Table 1 of arXiv 2104.04473: GPT-3's shape with a vocabulary of 51200, 1024 A100, batch 1536: 140 TFLOP/s.

    They count recomputation, 4 instead of 3 passes, and so 96 B s l h^2 (1 + s / 6h + V / 16lh) = 4/3 of ours.
    """
    layers, hidden, sequence, vocabulary = 96, 12288, 2048, 51200
    ours = 6 * (12 * layers * hidden**2 + hidden * vocabulary) + 12 * layers * hidden * sequence
    theirs = 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    # Their head is not recomputed, and so not 4/3.
    assert theirs - 6 * hidden * vocabulary == pytest.approx((ours - 6 * hidden * vocabulary) * 4 / 3, rel=1e-12)


def test_the_measures_are_one_another() -> None:
    values = Throughput(flops_per_token=2e9, gpus=4, peak_tflops=10).values(8000.0)
    assert values == {
        "throughput/tokens_per_second": 8000.0,
        "throughput/tokens_per_second_per_gpu": 2000.0,
        "throughput/model_tflops_per_gpu": 4.0,
        "throughput/mfu": 0.4,
    }
    assert "throughput/mfu" not in Throughput(2e9, 4).values(8000.0)


@pytest.mark.parametrize(
    ("device_name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 3090", "3090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_are_known_by_the_name_they_give(device_name: str, kind: str) -> None:
    assert gpu_named(device_name) is GPUS[kind]


@pytest.mark.parametrize("device_name", ["NVIDIA A10G", "NVIDIA L40", "Tesla V100-SXM2-32GB", ""])
def test_others_are_not_taken_for_them(device_name: str) -> None:
    assert gpu_named(device_name) is None


def test_phases_are_seconds_a_step() -> None:
    phases = Phases(torch.device("cpu"))
    for _ in range(4):
        with phases.lap("data"):
            time.sleep(0.01)
    with phases.lap("checkpoint"):
        time.sleep(0.04)
    taken = phases.take(4)
    assert taken.keys() == {"data", "checkpoint"}
    assert all(0.01 <= seconds < 0.5 for seconds in taken.values())
    assert phases.take(4) == {}


def test_the_memory_of_this_process() -> None:
    before = memory_in_use(torch.device("cpu"))["system/host_memory_gib"]
    held = torch.ones(2**27)
    after = memory_in_use(torch.device("cpu"))["system/host_memory_gib"]
    assert after - before == pytest.approx(held.nbytes / 2**30, rel=0.1)
