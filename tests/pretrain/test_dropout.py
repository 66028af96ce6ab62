"""Which ranks drop the same elements, and which must not."""

from typing import Any

import pytest
import torch

from tests.launch import launch

pytestmark = pytest.mark.dist

LAYOUTS = ["tp2", "tp2sp", "pp2", "dp2", "cp2", "pp2vpp2"]
EQUAL = {"tp2": {"hidden", "embedding"}}
"""What the two ranks of a layout drop alike: hidden states that both hold, but never their own heads' weights."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dropout")
    launch("tests.pretrain.dropout_worker", 2, str(folder), *LAYOUTS)
    return {layout: torch.load(folder / f"{layout}.pt") for layout in LAYOUTS}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_agree_where_they_hold_the_same_states_and_nowhere_else(results: dict[str, Any], layout: str) -> None:
    first, second = (rank["steps"][0] for rank in results[layout])
    for place in ("hidden", "attention", "embedding"):
        if first[place] and second[place]:  # the second pipeline stage has no embedding
            assert same(first[place], second[place]) == (place in EQUAL.get(layout, ())), place
    share = torch.stack(first["hidden"]).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_micro_batch_stage_and_step_has_its_own_masks(results: dict[str, Any], layout: str) -> None:
    for rank in results[layout]:
        step, again, other = rank["steps"]
        for place in ("hidden", "attention"):
            masks = [*step[place], *other[place]]
            assert not any(torch.equal(masks[i], masks[j]) for i in range(len(masks)) for j in range(i)), place
        assert all(same(step[name], again[name]) for name in step if step[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_drops_nothing_and_leaves_the_mode(results: dict[str, Any], layout: str) -> None:
    for rank in results[layout]:
        assert len(set(rank["losses"])) == 1
        assert rank["stayed in evaluation"]
        assert rank["trains"]
