"""The same training in every layout: losses, norms, validation, every gradient; and what must differ between ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import launch
from tests.pretrain import tiny

pytestmark = pytest.mark.dist

WORLDS = {
    1: [
        *["one", "one:tied", "one:pre_norm", "one:gpt2", "one:qk_norm", "one:recompute", "one:bf16"],
        *["one:documents", "one:documents_gpt2"],
    ],
    2: [
        *["tp2", "tp2sp", "pp2", "dp2", "tp2sp:pre_norm", "tp2sp:tied", "pp2:tied", "tp2sp:bf16", "dp2:bf16"],
        *["tp2sp:documents", "pp2:documents", "dp2:documents", "pp2:documents_gpt2"],
        *["tp2:gpt2", "tp2sp:gpt2", "pp2:gpt2", "tp2:qk_norm", "tp2sp:qk_norm", "pp2:qk_norm"],
        "tp2sp:dropped_all_reduce",
    ],
    4: [
        *["tp2pp2", "tp2pp2sp:recompute", "tp2pp2sp:gpt2", "tp2pp2sp:qk_norm", "tp2pp2:tied", "tp2dp2", "pp2dp2"],
        *["tp2pp2sp:documents", "tp2pp2sp:documents_gpt2", "pp4:documents"],
    ],
}
DIVIDED = [case for world in (2, 4) for case in WORLDS[world]]
EXACT = [case for case in DIVIDED if not case.endswith((":bf16", ":dropped_all_reduce"))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parity")
    for world_size, cases in WORLDS.items():
        for case in cases:
            launch("tests.pretrain.parity_worker", world_size, str(folder), case)
    return {case: torch.load(folder / f"{case}.pt") for cases in WORLDS.values() for case in cases}


def reference(results: dict[str, Any], case: str) -> Any:
    variant = case.partition(":")[2].replace("dropped_all_reduce", "").replace("recompute", "")
    return results[f"one:{variant}" if variant else "one"]


def worst_gradient(result: Any, expected: Any) -> float:
    assert result["gradients"].keys() == expected["gradients"].keys()
    return max(
        float((result["gradients"][name] - gradient).norm() / gradient.norm())
        for name, gradient in expected["gradients"].items()
    )


@pytest.mark.slow
def test_eight_processes_equal_one(results: dict[str, Any], tmp_path: Path) -> None:
    cases = ["tp2pp2dp2", "tp2pp2dp2sp:tied", "pp4dp2:pre_norm", "tp2pp2dp2sp:gpt2"]
    for case in cases:
        launch("tests.pretrain.parity_worker", 8, str(tmp_path), case, timeout=300)
        assert_equal(torch.load(tmp_path / f"{case}.pt"), reference(results, case))


@pytest.mark.parametrize("case", EXACT)
def test_fp32_equals_one_process(results: dict[str, Any], case: str) -> None:
    assert_equal(results[case], reference(results, case))


def assert_equal(result: Any, expected: Any) -> None:
    assert len(result["losses"]) == 20
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert result["by_layer"] == pytest.approx(expected["by_layer"], rel=1e-5)
    assert sum(norm**2 for norm in result["by_layer"]) ** 0.5 == pytest.approx(result["norms"][0], rel=1e-5)
    assert result["validation"] == pytest.approx(expected["validation"], rel=1e-5)
    assert worst_gradient(result, expected) < 1e-5


def test_recompute_changes_nothing(results: dict[str, Any]) -> None:
    assert results["one:recompute"]["losses"] == results["one"]["losses"]


@pytest.mark.parametrize("case", [case for case in DIVIDED if case.endswith(":bf16")])
def test_bf16_is_close_to_one_process(results: dict[str, Any], case: str) -> None:
    result, expected = results[case], results["one:bf16"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-2)
    assert worst_gradient(result, expected) < 0.05


def test_a_dropped_all_reduce_is_seen(results: dict[str, Any]) -> None:
    result, expected = results["tp2sp:dropped_all_reduce"], results["one"]
    assert worst_gradient(result, expected) > 1e-2
    assert result["norms"] != pytest.approx(expected["norms"], rel=1e-5)


def test_training_learns(results: dict[str, Any]) -> None:
    losses = results["one"]["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("case", "tp", "pp", "dp"), [("tp2pp2", 2, 2, 1), ("tp2dp2", 2, 1, 2), ("pp2dp2", 1, 2, 2)])
def test_every_rank_holds_its_shard(results: dict[str, Any], case: str, tp: int, pp: int, dp: int) -> None:
    one = results["one"]["ranks"][0]["shapes"]
    ranks = {rank["place"]: rank for rank in results[case]["ranks"]}
    assert set(ranks) == {(t, p, d) for t in range(tp) for p in range(pp) for d in range(dp)}
    for (_, pp_rank, _), rank in ranks.items():
        layers = {name.split(".")[2] for name in rank["shapes"] if name.startswith("decoder.layers.")}
        assert layers == {str(layer) for layer in range(pp_rank * 4 // pp, (pp_rank + 1) * 4 // pp)}
        for name, shape in rank["shapes"].items():
            assert shape == expected_shape(name, one[name], tp), name


def expected_shape(name: str, whole: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if name.startswith(("embedding.", "output_layer.")):
        return (-(-tiny.VOCAB // (128 * tp)) * 128, *whole[1:])
    if name.endswith(("linear_qkv.weight", "linear_fc1.weight")):
        return (whole[0] // tp, *whole[1:])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return (*whole[:1], whole[1] // tp)
    return whole


@pytest.mark.parametrize("case", ["dp2", "tp2dp2", "pp2dp2", "dp2:bf16"])
def test_zero_partitions_the_optimizer_state_once(results: dict[str, Any], case: str) -> None:
    """The data-parallel ranks own disjoint ranges that cover every parameter, each about half of the elements."""
    replicas: dict[tuple[int, int], list[Any]] = {}
    for rank in results[case]["ranks"]:
        replicas.setdefault(rank["place"][:2], []).append(rank)
    for ranks in replicas.values():
        totals = [0] * len(ranks)
        for name, shape in ranks[0]["shapes"].items():
            ranges = sorted((owned, i) for i, rank in enumerate(ranks) if (owned := rank["owned"][name]))
            ends = [0]
            for (start, end), i in ranges:
                assert start == ends[-1]
                ends.append(end)
                totals[i] += end - start
            assert ends[-1] == torch.Size(shape).numel(), name
        assert max(totals) - min(totals) <= 4  # alignment
