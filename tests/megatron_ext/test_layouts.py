"""Every case of the worker, in every layout, against data parallelism (each rank the whole model)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch import launch
from tests.megatron_ext.layouts_worker import CASES, EVERY_SCHEME, cases_of

pytestmark = pytest.mark.dist

OF_TWO = ["tp2", "tp2 sp", "pp2"]
OF_FOUR = ["tp2 pp2", "tp2 sp pp2", "pp4"]
VOCABULARY_PARALLEL = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
REFERENCE = "dp"
ALL = CASES | EVERY_SCHEME

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("layouts")
    launch("tests.megatron_ext.layouts_worker", 2, str(folder), REFERENCE, *OF_TWO)
    launch("tests.megatron_ext.layouts_worker", 4, str(folder), *OF_FOUR)
    return {layout: torch.load(folder / f"{layout}.pt") for layout in [REFERENCE, *OF_TWO, *OF_FOUR]}


def true_rows(name: str, tensor: Tensor, case: str) -> Tensor:
    return tensor[: ALL[case].vocab_size] if name in VOCABULARY_PARALLEL else tensor


def padding(name: str, tensor: Tensor, case: str) -> Tensor:
    return tensor[ALL[case].vocab_size :] if name in VOCABULARY_PARALLEL else tensor[:0]


layouts = pytest.mark.parametrize("layout", OF_TWO + OF_FOUR)
cases = pytest.mark.parametrize("case", CASES)
all_cases = pytest.mark.parametrize(
    ("layout", "case"), [(layout, case) for layout in OF_TWO + OF_FOUR for case in cases_of(layout)]
)


@all_cases
def test_the_initial_weights_are_the_same_bit_for_bit(results: Results, case: str, layout: str) -> None:
    expected, actual = results[REFERENCE][case]["weights"], results[layout][case]["weights"]
    assert actual.keys() == expected.keys()
    for name, copies in actual.items():
        for copy in copies:
            assert torch.equal(true_rows(name, copy, case), true_rows(name, expected[name][0], case)), name
            assert not padding(name, copy, case).any(), name


@cases
def test_tied_copies_are_equal_on_both_stages(results: Results, case: str) -> None:
    copies = results["pp2"][case]["weights"]["embedding.word_embeddings.weight"]
    assert len(copies) == (2 if CASES[case].tie_embeddings else 1)
    assert all(torch.equal(copies[0], copy) for copy in copies)


@all_cases
def test_the_loss_of_every_token_is_the_same(results: Results, case: str, layout: str) -> None:
    expected, actual = results[REFERENCE][case]["losses"], results[layout][case]["losses"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@all_cases
def test_every_gradient_is_the_same_on_every_copy(results: Results, case: str, layout: str) -> None:
    expected, actual = results[REFERENCE][case]["gradients"], results[layout][case]["gradients"]
    assert actual.keys() == expected.keys()
    for name, copies in actual.items():
        wanted = true_rows(name, expected[name][0], case)
        for copy in copies:
            error = (true_rows(name, copy, case) - wanted).norm() / wanted.norm()
            # A single number's gradient is a sum over all tokens, most of which cancels.
            assert error < (2e-3 if wanted.numel() == 1 else 1e-5), (name, error)
            assert not padding(name, copy, case).any(), name


@all_cases
def test_the_geometry_is_the_same_and_known_to_every_rank(results: Results, case: str, layout: str) -> None:
    expected, actual = results[REFERENCE][case], results[layout][case]
    torch.testing.assert_close(actual["angle"], expected["angle"], rtol=1e-5, atol=0)
    torch.testing.assert_close(actual["length"], expected["length"], rtol=1e-5, atol=0)
    for angle, length in actual["geometry on all ranks"]:
        assert torch.equal(angle, actual["angle"])
        assert torch.equal(length, actual["length"])


@layouts
def test_recomputation_changes_no_geometry(results: Results, layout: str) -> None:
    plain, recomputed = results[layout]["geonorm"], results[layout]["geonorm, recomputed"]
    torch.testing.assert_close(recomputed["angle"], plain["angle"], rtol=1e-12, atol=0)
    torch.testing.assert_close(recomputed["length"], plain["length"], rtol=1e-12, atol=0)


@all_cases
def test_the_meta_device_gives_the_same_shapes(results: Results, case: str, layout: str) -> None:
    assert results[layout][case]["meta"]
