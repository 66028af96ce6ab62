import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ext import GeometryProbe
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


def run(stage: Any) -> Tensor:
    tokens, labels, positions, weights = small.batch()
    return (stage(tokens, positions, None, labels=labels) * weights).sum()


@pytest.mark.parametrize("scheme", ["geonorm", "pre_norm"])
def test_equals_what_forward_hooks_see(scheme: str) -> None:
    stage = small.build(small.settings(scheme), dtype=torch.float64)
    states: list[list[Tensor]] = []
    for layer in stage.decoder.layers:
        # What enters the sublayers' first modules: the states (geonorm), or what the norms read (pre_norm).
        seen: list[Tensor] = []
        layer.input_layernorm.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        layer.pre_mlp_layernorm.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        layer.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output[0]))
        states.append(seen)
    probe = GeometryProbe(stage)
    with probe.recording():
        run(stage)
    geometry = probe.reduce()
    for index, (entering, middle, leaving) in enumerate(states):
        unit = entering / entering.norm(dim=-1, keepdim=True)
        expected = unit.flatten(0, 1).mean(0).norm()
        assert geometry.resultant_length[index].item() == pytest.approx(expected.item(), rel=1e-12)
        for sublayer, (x, y) in enumerate(((entering, middle), (middle, leaving))):
            angle = torch.acos(nn.functional.cosine_similarity(x, y, dim=-1).clamp(-1, 1)).mean()
            assert geometry.mean_angle[index, sublayer].item() == pytest.approx(angle.item(), rel=1e-6)


def test_small_angles_are_accurate_in_fp32() -> None:
    """acos of the inner product would give 0 or 3e-4 for 1e-5 rad."""
    stage = small.build(small.settings(residual={"decay": "none", "clamp": 1e-5}))
    probe = GeometryProbe(stage)
    with probe.recording():
        run(stage)
    torch.testing.assert_close(
        probe.reduce().mean_angle, torch.full((4, 2), 1e-5, dtype=torch.float64), rtol=0.01, atol=0
    )


def test_clamped_steps_turn_by_the_clamp() -> None:
    stage = small.build(small.settings(residual={"decay": "none", "clamp": 0.05, "alpha": 50.0}))
    probe = GeometryProbe(stage)
    with probe.recording():
        run(stage)
    torch.testing.assert_close(
        probe.reduce().mean_angle, torch.full((4, 2), 0.05, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_collapsed_states_have_length_one_and_spread_states_a_small_one() -> None:
    stage = small.build(small.settings())
    probe = GeometryProbe(stage)
    with torch.no_grad(), probe.recording():
        run(stage)
    assert probe.reduce().resultant_length[0] < 2 / math.sqrt(48)
    with torch.no_grad(), probe.recording():
        stage.embedding.word_embeddings.weight[:] = stage.embedding.word_embeddings.weight[0].clone()
        run(stage)
    assert probe.reduce().resultant_length[0].item() == pytest.approx(1, abs=1e-6)


def test_nothing_is_watched_outside_and_the_model_computes_the_same_inside() -> None:
    stage = small.build(small.settings())
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
    run(stage)
    assert all(layer.observer is None for layer in stage.decoder.layers)
    assert torch.equal(probe.reduce().mean_angle, first.mean_angle)


def test_several_micro_batches_and_a_second_recording() -> None:
    stage = small.build(small.settings())
    probe = GeometryProbe(stage)
    with probe.recording():
        run(stage)
    once = probe.reduce()
    with probe.recording():
        run(stage)
        run(stage)
    torch.testing.assert_close(probe.reduce().mean_angle, once.mean_angle)
    torch.testing.assert_close(probe.reduce().resultant_length, once.resultant_length)


def test_recomputation_changes_no_mean() -> None:
    results = []
    for recompute in ("none", "full"):
        stage = small.build(small.settings(recompute=recompute))
        probe = GeometryProbe(stage)
        with probe.recording():
            run(stage).backward()
        results.append(probe.reduce())
    torch.testing.assert_close(results[0].mean_angle, results[1].mean_angle, rtol=1e-12, atol=0)
    torch.testing.assert_close(results[0].resultant_length, results[1].resultant_length, rtol=1e-12, atol=0)


def test_a_model_without_our_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer that can be observed"):
        GeometryProbe(nn.Linear(2, 2))
