import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megatron_ext import SCHEMES, Geometry, GeometryProbe, find_documents
from megatron_ext.attention import largest_logit
from megatron_ext.context import own_part
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")

LEARNED = {"learn_alpha": True, "learn_angle_scale": True, "clamp": 0.4, "alpha": 2.0}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in SCHEMES},
    "p": {"p": 1.5},
    "geonorm": LEARNED,
    "proj": {"radius": "learned", "clamp": 0.4},
}
"""Settings of the residual by scheme."""


def run(stage: Any) -> Tensor:
    tokens, labels, positions, weights = small.batch()
    return (stage(tokens, positions, None, labels=labels) * weights).sum()


def probed(stage: Any, *runs: Callable[[Any], Any]) -> Geometry:
    probe = GeometryProbe(stage)
    with probe.recording():
        for a_run in runs or (run,):
            a_run(stage)
    return probe.reduce()


class Step(NamedTuple):
    """One sublayer's step: state, increment, new state in fp64, and the step size."""

    x: Tensor
    u: Tensor
    y: Tensor
    alpha: float


def steps_of(stage: Any) -> list[list[Step]]:
    """What each sublayer of each layer did."""
    steps: list[list[Step]] = []
    for layer in stage.decoder.layers:
        of_layer: list[Step] = []
        for module in (layer.self_attn_bda, layer.mlp_bda):
            inner = module.join

            def join(
                x: Tensor, u: Tensor, inner: Any = inner, module: Any = module, seen: Any = of_layer, **before: Any
            ) -> Tensor:
                y = inner(x, u)
                seen.append(
                    Step(x.detach(), u.detach(), y.detach(), float(torch.as_tensor(module.step_size()).detach()))
                )
                return y

            module.join = join
        steps.append(of_layer)
    run(stage)
    for layer in stage.decoder.layers:
        del layer.self_attn_bda.join, layer.mlp_bda.join
    return steps


def plain(steps: list[list[Step]]) -> dict[str, Tensor]:
    """The definitions as they stand in Geometry's docstring, row by row; acos is exact enough in fp64."""
    found: dict[str, list[list[float]]] = {
        name: [] for name in ("mean_angle", "largest_angle", "beta", "radial_share", "step_size")
    }
    radii, directions = [], []
    for of_layer in steps:
        rows: dict[str, list[float]] = {name: [] for name in found}
        for x, u, y, alpha in of_layer:
            angle = torch.acos(nn.functional.cosine_similarity(x, y, dim=-1).clamp(-1, 1))
            cosine = nn.functional.cosine_similarity(x, u, dim=-1)
            beta = alpha * u.norm(dim=-1) * (1 - cosine**2).sqrt() / x.norm(dim=-1)
            rows["mean_angle"].append(angle.mean().item())
            rows["largest_angle"].append(angle.max().item())
            rows["beta"].append(beta.mean().item())
            rows["radial_share"].append(cosine.square().mean().item())
            rows["step_size"].append(alpha)
        for name, row in rows.items():
            found[name].append(row)
        entering = of_layer[0].x
        radii.append(entering.norm(dim=-1).flatten())
        directions.append((entering / entering.norm(dim=-1, keepdim=True)).flatten(0, 1).mean(0).norm())
    radius = torch.stack(radii)
    of_layers = {
        "radius": radius.mean(1),
        "radius_drift": radius.mean(1) / radius[0].mean() - 1,
        "largest_radius_drift": (radius / radius[0].mean() - 1).abs().amax(1),
        "resultant_length": torch.stack(directions),
        "largest_activation": torch.stack([of_layer[1].y.abs().max() for of_layer in steps]),
    }
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in found.items()} | of_layers


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_the_plain_definitions_for_every_scheme(scheme: str) -> None:
    stage = small.build(small.settings(scheme, CASES[scheme]), dtype=torch.float64)
    expected = plain(steps_of(stage))
    geometry = probed(stage)
    for name, wanted in expected.items():
        error = (getattr(geometry, name) - wanted).abs()
        assert (error <= 1e-6 * wanted.abs() + 1e-10).all(), (name, error)


@pytest.mark.parametrize("scheme", ["geonorm", "proj"])
def test_the_share_at_the_clamp_is_that_of_the_angles_that_reach_it(scheme: str) -> None:
    stage = small.build(small.settings(scheme, CASES[scheme]), dtype=torch.float64)
    steps = steps_of(stage)
    share = [
        [
            (torch.acos(nn.functional.cosine_similarity(step.x, step.y, dim=-1)) > 0.4 - 1e-9).double().mean().item()
            for step in of_layer
        ]
        for of_layer in steps
    ]
    expected = torch.tensor(share, dtype=torch.float64)
    assert 0 < expected.min() < 1 or 0 < expected.max() < 1
    torch.testing.assert_close(probed(stage).clamped_share, expected)


def test_the_sphere_keeps_its_radius_and_pre_norm_does_not() -> None:
    sphere = probed(small.build(small.settings(residual={"radius": 3.0})))
    torch.testing.assert_close(sphere.radius, torch.full((4,), 3.0, dtype=torch.float64), rtol=1e-6, atol=0)
    assert sphere.largest_radius_drift.max() < 1e-6
    free = probed(small.build(small.settings("pre_norm")))
    assert free.radius_drift[0] == 0
    assert free.largest_radius_drift[0] > 0
    assert free.radius_drift[-1] > 0.5


def test_a_state_or_an_update_of_zeros_counts_as_no_step() -> None:
    stage = small.build(small.settings("pre_norm", positions="none", linear_bias=False))
    with torch.no_grad():
        stage.embedding.word_embeddings.weight.zero_()
    geometry = probed(stage)
    for value in (geometry.mean_angle, geometry.beta, geometry.radial_share, geometry.resultant_length):
        assert not value.any()


def test_small_angles_are_accurate_in_fp32() -> None:
    """acos of the inner product would give 0 or 3e-4 for 1e-5 rad."""
    stage = small.build(small.settings(residual={"decay": "none", "clamp": 1e-5}))
    wanted = torch.full((4, 2), 1e-5, dtype=torch.float64)
    torch.testing.assert_close(probed(stage).mean_angle, wanted, rtol=0.01, atol=0)


def test_clamped_steps_turn_by_the_clamp() -> None:
    geometry = probed(small.build(small.settings(residual={"decay": "none", "clamp": 0.05, "alpha": 50.0})))
    for angle in (geometry.mean_angle, geometry.largest_angle):
        torch.testing.assert_close(angle, torch.full((4, 2), 0.05, dtype=torch.float64), rtol=1e-5, atol=0)
    assert (geometry.clamped_share == 1).all()


def test_collapsed_states_have_length_one_and_spread_states_a_small_one() -> None:
    stage = small.build(small.settings())
    assert probed(stage).resultant_length[0] < 2 / math.sqrt(48)
    with torch.no_grad():
        stage.embedding.word_embeddings.weight[:] = stage.embedding.word_embeddings.weight[0].clone()
    assert probed(stage).resultant_length[0].item() == pytest.approx(1, abs=1e-6)


def test_nothing_is_watched_outside_and_the_model_computes_the_same_inside() -> None:
    stage = small.build(small.settings(residual=LEARNED))
    probe = GeometryProbe(stage)
    with pytest.raises(ValueError, match="nothing was recorded"):
        probe.reduce()
    outside = run(stage)
    with pytest.raises(ValueError, match="nothing was recorded"):
        probe.reduce()
    with probe.recording():
        inside = run(stage)
    first = probe.reduce()
    assert torch.equal(outside, inside)
    assert all(residual.observer is None for residual in probe.residuals)
    run(stage)
    assert torch.equal(probe.reduce().mean_angle, first.mean_angle)


def test_recording_never_waits_for_the_device() -> None:
    """On the meta device there are no values: whatever asks for one raises."""
    stage = small.build(small.settings(residual=LEARNED), device="meta")
    probe = GeometryProbe(stage)
    state, increment, new_state = torch.empty(3, small.SEQUENCE, small.BATCH, 32, device="meta")
    with probe.recording():
        for residual in probe.residuals:
            assert residual.observer is not None
            residual.observer(residual, state, increment, new_state)


def values_of(geometry: Geometry) -> dict[str, Tensor]:
    return dict(vars(geometry))


def test_several_micro_batches_and_a_second_recording() -> None:
    stage = small.build(small.settings())
    once, twice = values_of(probed(stage)), values_of(probed(stage, run, run))
    for name, wanted in once.items():
        torch.testing.assert_close(twice[name], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["geonorm", "pre_norm"])
def test_recomputation_changes_nothing(scheme: str) -> None:
    plain, recomputed = (
        values_of(
            probed(
                small.build(small.settings(scheme, CASES[scheme], recompute=recompute)),
                lambda stage: run(stage).backward(),
            )
        )
        for recompute in ("none", "full")
    )
    for name, wanted in plain.items():
        torch.testing.assert_close(recomputed[name], wanted, rtol=1e-12, atol=1e-12)


def test_a_model_without_our_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer that can be observed"):
        GeometryProbe(nn.Linear(2, 2))


@pytest.mark.parametrize("changes", [{}, {"num_query_groups": None}], ids=["grouped", "one key a head"])
def test_the_largest_logits_are_those_of_plain_products(changes: dict[str, Any]) -> None:
    """Of the attention those of the first sample of the first pass, of the output those of all tokens."""
    stage = small.build(small.settings(**changes), dtype=torch.float64)
    queries_and_keys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in stage.decoder.layers]
    for layer, seen in zip(stage.decoder.layers, queries_and_keys, strict=True):
        core = layer.self_attention.core_attention
        core.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[:2]))
    tokens, _, positions, _ = small.batch()
    logits: list[Tensor] = []
    with torch.no_grad():
        geometry = probed(stage, lambda s: logits.append(s(tokens, positions, None)), run)
    expected = []
    for seen in queries_and_keys:
        query, key = (tensor[:, 0].transpose(0, 1) for tensor in seen[0])
        key = key.repeat_interleave(len(query) // len(key), dim=0)
        products = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        expected.append(products[:, torch.ones_like(products[0]).tril().bool()].max())
    torch.testing.assert_close(geometry.largest_attention_logit, torch.stack(expected), rtol=1e-12, atol=0)
    torch.testing.assert_close(geometry.largest_logit, logits[0].max(), rtol=1e-12, atol=0)


def test_the_largest_attention_logit_in_blocks_and_within_documents() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(20, 2, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    query[15], query[1] = 10 * key[2], 20 * key[18]  # across documents, and to a token that is yet to come
    tokens = torch.ones(2, 20, dtype=torch.int64)
    tokens[0, [6, 12]] = 0
    documents = find_documents(tokens, 0)
    products = torch.einsum("qhd,khd->hqk", query[:, 0], key[:, 0]) * 0.5
    causal = torch.ones(20, 20).tril().bool()
    apart = torch.block_diag(torch.ones(7, 7), torch.ones(6, 6), torch.ones(7, 7)).bool() & causal
    for seen, given in ((causal, None), (apart, documents)):
        for rows in (3, 20, 512):
            position_ids = torch.arange(20) if given is None else given.position_ids[0]
            largest = largest_logit(query, key, torch.arange(20), position_ids, 0.5, rows)
            torch.testing.assert_close(largest, products[:, seen].max(), rtol=1e-12, atol=0)
            # Of two context-parallel ranks each sees its own queries, and both together all of them.
            parts = [own_part(torch.arange(20)[None], cp_rank, 2)[0] for cp_rank in range(2)]
            of_ranks = [largest_logit(query[part], key, part, position_ids[part], 0.5, rows) for part in parts]
            wanted = [products[:, part][:, seen[part]].max() for part in parts]
            torch.testing.assert_close(torch.stack(of_ranks), torch.stack(wanted), rtol=1e-12, atol=0)
    assert products[:, apart].max() < products[:, causal].max() < products.max()
