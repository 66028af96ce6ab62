"""The geometry of two processes in every layout equals that of one process, on both ranks alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import ParallelSettings
from tests.launch import launch
from tests.megatron_ext.geometry_worker import CASES, LAYOUTS, geometry

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("single_process")]

Ranks = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    folder: Path = tmp_path_factory.mktemp("geometry")
    launch("tests.megatron_ext.geometry_worker", 2, str(folder))
    return {layout: [torch.load(folder / f"{layout} {i}.pt") for i in range(2)] for layout in LAYOUTS}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(results: dict[str, Ranks], layout: str, case: str) -> None:
    expected = vars(geometry(CASES[case], ParallelSettings()))
    for of_rank in results[layout]:
        for name, wanted in expected.items():
            error = (of_rank[case][name] - wanted).abs()
            # A drift is a difference of norms in fp32; on the sphere it is their rounding alone.
            floor = 1e-6 if "drift" in name else 1e-9
            assert (error <= 1e-5 * wanted.abs() + floor).all(), (name, error)
        for name, value in results[layout][0][case].items():
            assert torch.equal(of_rank[case][name], value), name
