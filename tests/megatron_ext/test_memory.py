"""What is measured on the meta device against real tensors on the CPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_ext import SCHEMES, ModelSettings, ParallelSettings, build_model
from megatron_ext.memory import LiveBytes, StageParts, stage_parts
from megatron_ext.pretended import pretended_rank
from tests.launch import launch
from tests.megatron_ext import small
from tests.megatron_ext.counted import saved_bytes

LAYERS = 3
CHOICES: list[dict[str, Any]] = [
    {"dropout": 0.1},
    {"dropout": 0.1, "recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective", "linear_bias": True},
    {"activation": "gelu", "normalization": "layernorm", "linear_bias": True, "positions": "learned"},
    {"num_query_groups": None, "qk_norm": True, "z_loss": 1e-4, "output_bias": "none"},
    {"tie_embeddings": True, "positions": "none", "vocab_size": 256},
]


def model_of(scheme: str = "geonorm", **changes: Any) -> ModelSettings:
    return small.settings(scheme, num_layers=LAYERS, **changes)


def all_saved(parts: StageParts, layers: int = LAYERS) -> int:
    return parts.embedding_saved + layers * parts.layer_saved + parts.head_saved


@pytest.fixture
def real_groups() -> Iterator[None]:
    """One process that is its own group, after the measurement, which wants none."""
    with torch.random.fork_rng(devices=[]):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def expected(model: ModelSettings, dtype: torch.dtype = torch.bfloat16) -> int:
    return all_saved(stage_parts(model, ParallelSettings(), 2, dtype, "cpu"))


CASES = [
    *((scheme, {"recompute": recompute}) for scheme in SCHEMES for recompute in ("none", "selective", "full")),
    *((scheme, changes) for scheme in ("geonorm", "pre_norm") for changes in CHOICES),
    ("proj", {"normalization": "layernorm", "activation": "gelu"}),
    ("sandwich_norm", {"normalization": "layernorm", "dropout": 0.1}),
]


@pytest.fixture(scope="module")
def measured() -> list[int]:
    """Of every case, before any group starts."""
    return [expected(model_of(scheme, **changes)) for scheme, changes in CASES]


def test_nothing_is_left_behind() -> None:
    before = torch.get_rng_state()
    expected(model_of("keel", dropout=0.2))
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert not tensor_parallel.get_cuda_rng_tracker().get_states()
    assert torch.equal(torch.get_rng_state(), before)


def test_kept_bytes_are_those_of_real_tensors(measured: list[int], real_groups: None) -> None:
    for (scheme, changes), kept in zip(CASES, measured, strict=True):
        counted = saved_bytes(model_of(scheme, **changes), ParallelSettings(), 2, torch.bfloat16)
        assert kept == pytest.approx(counted, rel=0.01), (scheme, changes)


def test_running_groups_are_left_alone(real_groups: None) -> None:
    with pytest.raises(RuntimeError, match="process groups run already"):
        stage_parts(model_of(init_std=0.7), ParallelSettings(), 1, torch.float32, "cpu")
    assert parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "positions": "learned"}], ids=["own", "tied"])
@pytest.mark.parametrize("scheme", ["proj", "peri_ln", "pre_dyt", "post_norm"])
def test_parameters_of_every_rank_are_exact(scheme: str, changes: dict[str, Any]) -> None:
    residual = {"radius": "learned"} if SCHEMES[scheme].on_sphere else {}
    model = small.settings(scheme, residual, num_layers=4, linear_bias=True, qk_norm=True, **changes)
    for tp, pp in ((1, 1), (2, 2)):
        layout = ParallelSettings(tp=tp, sp=tp > 1, pp=pp)
        parts = stage_parts(model, layout, 1, torch.bfloat16, "cuda")
        for pp_rank in range(pp):
            with pretended_rank(layout, pp_rank):
                stage = build_model(model, layout, dtype=torch.bfloat16, device="meta", seed=0, token_counts=None)
            held = (parts.layer * (4 // pp)).held
            held += parts.embedding.held if pp_rank == 0 else 0
            held += parts.head.held + (parts.tied.held if pp > 1 else 0) if pp_rank == pp - 1 else 0
            assert held == sum(parameter.numel() for parameter in stage.parameters()), (layout, pp_rank)


@pytest.mark.dist
def test_two_parallel_ranks_keep_what_is_measured_for_one() -> None:
    outputs = launch("tests.megatron_ext.memory_worker", 2)
    counted = [int(number) for number in outputs[0].split()]
    for layout, number in zip(({"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}), counted, strict=True):
        parts = stage_parts(model_of(), ParallelSettings(**layout), 2, torch.bfloat16, "cpu")
        assert all_saved(parts) == pytest.approx(number, rel=0.01), layout


def test_a_gpus_kernels_keep_less_of_attention_with_dropout_and_else_the_same() -> None:
    """On the CPU whole attention matrices are made for dropout."""
    for scheme, dropout in (("pre_norm", 0.0), ("geonorm", 0.1)):
        on_cpu, on_gpu = (
            stage_parts(model_of(scheme, dropout=dropout), ParallelSettings(), 2, torch.bfloat16, target).layer_saved
            for target in ("cpu", "cuda")
        )
        assert on_gpu < on_cpu if dropout else on_gpu == on_cpu


def test_a_layer_on_the_sphere_keeps_less_than_one_with_norms() -> None:
    """By what the norms put out, [rows, hidden] twice; three numbers of fp32 a row take the place of one."""
    rows, hidden = 2 * small.SEQUENCE, 32
    pre_norm, geonorm = (
        stage_parts(model_of(scheme), ParallelSettings(), 2, torch.bfloat16, "cpu").layer_saved
        for scheme in ("pre_norm", "geonorm")
    )
    assert pre_norm - geonorm == 2 * rows * (2 * hidden + 4 - 3 * 4)


def test_bytes_at_work() -> None:
    model = model_of(vocab_size=8192)
    parts = stage_parts(model, ParallelSettings(), 2, torch.bfloat16, "cuda")
    logits = 2 * small.SEQUENCE * 8192
    # Logits in bf16, their fp32 copy that becomes the softmax, and one more for its exponential or gradient.
    assert 6 * logits < parts.head_work < 13 * logits
    again = stage_parts(dataclasses.replace(model, recompute="full"), ParallelSettings(), 2, torch.bfloat16, "cuda")
    assert again.layer_saved < parts.layer_saved / 5
    assert again.layer_work > parts.layer_saved - again.layer_saved
    assert again.head_work == pytest.approx(parts.head_work, rel=0.001)


def test_live_bytes() -> None:
    alive = LiveBytes()
    with alive:
        first = torch.zeros(1000)
        view = first[:10]
        second = first + 1
        assert (alive.live, alive.peak) == (8000, 8000)
        del first, view
        assert (alive.live, alive.peak) == (4000, 8000)
        assert alive.restart() == 8000
        assert alive.peak == 4000
    assert second.shape == (1000,)
