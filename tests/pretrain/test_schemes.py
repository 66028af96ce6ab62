"""Every residual scheme trains the same in a divided model, and its checkpoint goes on in another layout."""

from typing import Any

import pytest
import torch

from tests.launch import launch
from tests.pretrain.schemes_worker import SAVED, VARIANTS
from tests.pretrain.test_parity import errors

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("schemes")
    for variant in VARIANTS:
        launch("tests.pretrain.schemes_worker", 1, str(folder), variant, "one")
        launch("tests.pretrain.schemes_worker", 4, str(folder), variant, "tp2pp2sp", "tp2dp2")
    return {
        layout: {variant: torch.load(folder / f"{variant} {layout}.pt") for variant in VARIANTS}
        for layout in ("one", "tp2pp2sp")
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_divided_model_trains_as_one_process(results: dict[str, Any], variant: str) -> None:
    result, expected = results["tp2pp2sp"][variant]["trained"], results["one"][variant]["trained"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert max(errors(matrices_and_gains(result), matrices_and_gains(expected), "gradients").values()) < 1e-5
    for name, gradient in expected["gradients"].items():
        if gradient.numel() == 1:
            # A sum over all tokens that nearly cancels: rounding is to be seen beside the whole gradient.
            assert float((result["gradients"][name] - gradient).abs()) < 1e-7 * expected["norms"][0], name


def matrices_and_gains(result: dict[str, Any]) -> dict[str, Any]:
    return {"gradients": {name: value for name, value in result["gradients"].items() if value.numel() > 1}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_checkpoint_goes_on_in_another_layout(results: dict[str, Any], variant: str) -> None:
    """From tensor, sequence and pipeline parallel to tensor and data parallel with recomputation."""
    stayed, moved = results["tp2pp2sp"][variant]["trained"], results["tp2pp2sp"][variant]["loaded"]
    assert moved["losses"][0] == pytest.approx(stayed["losses"][SAVED], rel=1e-6)
    assert moved["losses"] == pytest.approx(stayed["losses"][SAVED:], rel=1e-5)
    assert moved["norms"] == pytest.approx(stayed["norms"][SAVED:], rel=1e-5)
