"""The same training in every layout: losses, norms, validation, every gradient, the weights that come out of it.

Each case is ``layout:variant+variant`` (see :mod:`tests.pretrain.parity_worker`) and is compared with one process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import launch
from tests.pretrain import tiny
from tests.pretrain.parity_worker import CHANGES_NOTHING, MUTATIONS

pytestmark = pytest.mark.dist

CORE = {
    1: ["one:compiled"],
    2: [
        *[
            "tp2sp",
            "dp2",
            "tp2sp:tied",
            "pp2:tied",
            "tp2sp:documents+qk_norm+recompute",
            "tp2:qk_norm",
            "pp2:documents",
        ],
        *["pp2vpp2:tied", "pp2vpp2:documents+micro1", "cp2:documents+selective", "cp2:gpt2", "cp2:zero3+learned"],
        *["dp2:zero0", "dp2:zero2+recompute", "dp2:zero3+tied+selective", "dp2:offload", "pp2:offload+zero0"],
        *["tp2sp:bf16", "dp2:bf16", "dp2:bf16+zero0", "dp2:bf16+zero3", "dp2:bf16+offload"],
        *["tp2sp:dropped_all_reduce", "pp2:tied+doubled_tied_gradient", "pp2:swapped_micro_batches"],
        *["dp2:zero0+dropped_average", "tp2sp:zero2+dropped_hook"],
    ],
    4: [
        *["tp2pp2sp:gpt2", "tp2pp2sp:learned+recompute", "tp2dp2:zero3", "pp2dp2", "pp4:documents"],
        *["tp2pp2vpp2sp:qk_norm", "tp2dp2sp:zero2+gpt2", "pp2dp2:bf16+zero0"],
        *["cp2tp2sp:documents", "cp2pp2vpp2:tied", "cp2dp2"],
    ],
}
"""What runs in continuous integration."""

SLOW = {
    1: [
        "one:compiled+recompute",
        "one:selective",
        "one:zero0",
        "one:zero2",
        "one:zero3",
        "one:offload",
        "one:micro1",
        "one:micro8",
    ],
    2: [
        *["tp2", "pp2", "tp2:gpt2", "pp2:gpt2+documents", "pp2:qk_norm", "cp2"],
        *[f"{layout}:{more}" for layout in ("tp2sp", "pp2", "pp2vpp2", "cp2") for more in ("learned", "pre_norm")],
        *[f"{layout}:{variant}" for layout in ("tp2sp", "cp2", "dp2") for variant in ("qk_norm", "micro1")],
        *[f"dp2:zero{stage}+{more}" for stage in (0, 2, 3) for more in ("offload", "learned", "documents+gpt2")],
        *[f"tp2sp:zero{stage}+{more}" for stage in (0, 2, 3) for more in ("tied", "gpt2+recompute", "qk_norm")],
        *[f"cp2:zero{stage}+tied+documents" for stage in (0, 2, 3)],
        *[f"{layout}:bf16+{more}" for layout in ("tp2sp", "dp2") for more in ("zero2", "zero3+offload", "selective")],
        *[
            "tp2sp:compiled",
            "pp2vpp2:compiled",
            "cp2:compiled",
            "dp2:compiled+selective",
            "dp2:zero2+compiled",
            "dp2:bf16+compiled",
        ],
        *["pp2:micro4", "tp2:tied+micro8", "cp2:bf16+documents", "pp2vpp2:bf16", "pp2vpp2:gpt2+offload"],
    ],
    4: [
        *[f"tp2pp2sp:{variant}" for variant in ("tied", "pre_norm", "documents+gpt2", "qk_norm+selective", "zero0")],
        *[f"tp2pp2vpp2sp:{variant}" for variant in ("tied", "learned", "documents+recompute", "zero0+offload")],
        *[f"pp2vpp2dp2:{variant}" for variant in ("tied", "gpt2", "zero0")],
        *[f"cp2tp2sp:{variant}" for variant in ("gpt2", "learned", "zero2", "zero3+tied+recompute", "bf16")],
        *[f"cp2dp2:{variant}" for variant in ("documents", "zero2+offload", "zero3", "bf16+zero0")],
        *[f"cp2pp2:{variant}" for variant in ("gpt2", "learned+selective", "documents+recompute")],
        *[f"tp2dp2sp:{variant}" for variant in ("zero3+learned+recompute", "zero3+documents", "bf16+zero2", "offload")],
        *[
            "tp2dp2",
            "tp2pp2:tied",
            "cp4",
            "pp4:tied",
            "pp4:gpt2+micro1",
            "cp4:documents+gpt2",
            "cp4:zero3+tied",
            "cp2pp2vpp2:documents",
        ],
    ],
    8: [
        *["tp2pp2dp2", "tp2pp2dp2sp:tied", "pp4dp2:pre_norm", "tp2pp2dp2sp:gpt2+zero0"],
        *["tp2pp2vpp2dp2sp:learned", "cp2tp2pp2sp:documents+tied"],
    ],
}

CASES_OF_A_PROCESS = 8
"""The groups of every layout leave threads behind that poll, so that a process gets slower with each."""

Results = dict[str, Any]


def reference_of(case: str) -> str:
    """The case of one process that it must equal."""
    kept = [name for name in case.partition(":")[2].split("+") if name not in (*CHANGES_NOTHING, *MUTATIONS, "")]
    return f"one:{'+'.join(kept)}" if kept else "one"


def run(worlds: dict[int, list[str]], folder: Path) -> Results:
    """All cases and those they are compared with."""
    cases = [case for world in worlds.values() for case in world]
    references = {reference_of(case): None for case in cases} | {"one:recompute": None}
    for world_size, some in ({1: []} | worlds).items():
        some = [*references, *some] if world_size == 1 else some
        for first in range(0, len(some), CASES_OF_A_PROCESS):
            few = some[first : first + CASES_OF_A_PROCESS]
            launch("tests.pretrain.parity_worker", world_size, str(folder), *few, timeout=600)
    return {case: torch.load(folder / f"{case}.pt") for case in [*references, *cases]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(CORE, tmp_path_factory.mktemp("parity"))


def kinds(worlds: dict[int, list[str]]) -> tuple[list[str], list[str], list[str]]:
    """The cases in fp32, in bf16, and those with a mutation."""
    cases = [case for world in worlds.values() for case in world]
    mutated = [case for case in cases if case.split("+")[-1].split(":")[-1] in MUTATIONS]
    rounded = [case for case in cases if "bf16" in case]
    return [case for case in cases if case not in (*mutated, *rounded)], rounded, mutated


EXACT, ROUNDED, MUTATED = kinds(CORE)


def errors(result: Any, expected: Any, what: str) -> dict[str, float]:
    """Each parameter's relative difference over its whole tensor."""
    assert result[what].keys() == expected[what].keys()
    return {name: float((result[what][name] - whole).norm() / whole.norm()) for name, whole in expected[what].items()}


def assert_equal(result: Any, expected: Any) -> None:
    assert len(result["losses"]) == 20
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert result["by_layer"] == pytest.approx(expected["by_layer"], rel=1e-5)
    assert sum(norm**2 for norm in result["by_layer"]) ** 0.5 == pytest.approx(result["norms"][0], rel=1e-5)
    assert result["validation"] == pytest.approx(expected["validation"], rel=1e-5)
    assert torch.allclose(result["of_layers"], expected["of_layers"], rtol=1e-4, atol=0), "norms per layer"
    for what in ("gradients", "weights"):
        for name, error in errors(result, expected, what).items():
            # A single number's gradient is a sum over all tokens, most of which cancels.
            assert error < (2e-3 if expected[what][name].numel() == 1 else 1e-5), (what, name, error)


def test_norms_per_layer_are_those_of_whole_tensors(results: dict[str, Any]) -> None:
    """Of gradient, weights and update of the first step; in other layouts they equal these."""
    one = results["one"]
    rows: list[list[torch.Tensor]] = [[] for _ in range(6)]
    before, after = one["first_weights"], one["second_weights"]
    for name, gradient in one["gradients"].items():
        row = int(name.split(".")[2]) if name.startswith("decoder.layers.") else 4 + (not name.startswith("embedding"))
        columns = (gradient, before[name], after[name] - before[name])
        rows[row].append(torch.stack([tensor.double().square().sum() for tensor in columns]))
    gradient, size, update = torch.stack([torch.stack(row).sum(0) for row in rows]).sqrt().unbind(1)
    expected = torch.stack([gradient, size, update / size], dim=1)
    assert torch.allclose(one["of_layers"][0], expected, rtol=1e-5, atol=0)
    assert one["of_layers"][:, :, 0].square().sum(1).sqrt().tolist() == pytest.approx(one["norms"], rel=1e-5)


def assert_close(result: Any, expected: Any) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-2)
    assert max(errors(result, expected, "gradients").values()) < 0.05
    assert max(errors(result, expected, "weights").values()) < 0.02


@pytest.mark.parametrize("case", EXACT)
def test_fp32_equals_one_process(results: Results, case: str) -> None:
    assert_equal(results[case], results[reference_of(case)])


@pytest.mark.parametrize("case", ROUNDED)
def test_bf16_is_close_to_one_process(results: Results, case: str) -> None:
    assert_close(results[case], results[reference_of(case)])


@pytest.mark.parametrize("case", MUTATED)
def test_a_mistake_is_seen(results: Results, case: str) -> None:
    result, expected = results[case], results[reference_of(case)]
    assert max(errors(result, expected, "gradients").values()) > 1e-2
    steps = len(result["losses"])
    assert result["norms"] != pytest.approx(expected["norms"][:steps], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SLOW)
def test_the_rest_of_the_matrix(world_size: int, tmp_path: Path) -> None:
    worlds = {world_size: SLOW[world_size]}
    results = run(worlds, tmp_path)
    exact, rounded, _ = kinds(worlds)
    for case in exact:
        assert_equal(results[case], results[reference_of(case)])
    for case in rounded:
        assert_close(results[case], results[reference_of(case)])


def test_recompute_changes_nothing(results: Results) -> None:
    assert results["one:recompute"]["losses"] == results["one"]["losses"]


def test_a_compiled_layer_is_one_graph(results: Results) -> None:
    """One for the first layer, one for all others with their step sizes as a variable, and the probe for a compiler."""
    assert results["one:compiled"]["graphs"] == (3, 0)
    assert results["one"]["graphs"] == (0, 0)


def test_training_learns(results: Results) -> None:
    losses = results["one"]["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("case", "tp", "pp", "dp"), [("tp2dp2:zero3", 2, 1, 2), ("pp2dp2", 1, 2, 2)])
def test_every_rank_holds_its_shard(results: Results, case: str, tp: int, pp: int, dp: int) -> None:
    one = results[reference_of(case)]["ranks"][0]["shapes"]
    ranks = {rank["place"]: rank for rank in results[case]["ranks"]}
    assert set(ranks) == {(t, p, d) for t in range(tp) for p in range(pp) for d in range(dp)}
    for (_, pp_rank, _), rank in ranks.items():
        layers = {name.split(".")[2] for name in rank["shapes"] if name.startswith("decoder.layers.")}
        assert layers == {str(layer) for layer in range(pp_rank * 4 // pp, (pp_rank + 1) * 4 // pp)}
        for name, shape in rank["shapes"].items():
            assert shape == expected_shape(name, one[name], tp), name


def test_virtual_stages_take_turns(results: Results) -> None:
    for rank in results["pp2vpp2:tied"]["ranks"]:
        layers = {name.split(".")[2] for name in rank["shapes"] if name.startswith("decoder.layers.")}
        assert layers == ({"0", "2"} if rank["place"][1] == 0 else {"1", "3"})


def expected_shape(name: str, whole: tuple[int, ...], tp: int) -> tuple[int, ...]:
    if name.startswith(("embedding.", "output_layer.")):
        return (-(-tiny.VOCAB // (128 * tp)) * 128, *whole[1:])
    if name.endswith(("linear_qkv.weight", "linear_fc1.weight")):
        return (whole[0] // tp, *whole[1:])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return (*whole[:1], whole[1] // tp)
    return whole


@pytest.mark.parametrize("case", ["dp2", "pp2dp2", "dp2:bf16", "cp2dp2", "dp2:offload"])
def test_zero_partitions_the_optimizer_state_once(results: Results, case: str) -> None:
    """Ranks with the same weights own disjoint ranges that cover every parameter, each about as many elements."""
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
        assert max(totals) - min(totals) <= 4 * len(ranks)  # alignment


def test_zero_3_halves_every_parameter(results: Results) -> None:
    for rank in results["tp2dp2:zero3"]["ranks"]:
        for name, shape in rank["shapes"].items():
            start, end = rank["owned"][name]
            assert end - start == torch.Size(shape).numel() / 2, name
            assert (start == 0) == (rank["place"][2] == 0)


def test_without_zero_every_rank_owns_all(results: Results) -> None:
    for rank in results["dp2:zero0"]["ranks"]:
        assert all(rank["owned"][name] == (0, torch.Size(shape).numel()) for name, shape in rank["shapes"].items())
