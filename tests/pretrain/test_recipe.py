from typing import Any

import pytest

from megatron_ext import SCHEMES
from pretrain.recipe import RECIPES, advice, fill_optimizer, recipe_lr, recipe_warmup


def filled(scheme: str = "pre_norm", **optimizer: Any) -> Any:
    tree: dict[str, Any] = {
        "model": {"hidden_size": 768, "residual": {"scheme": scheme}},
        "train": {"steps": 5000},
        "optimizer": dict(optimizer),
    }
    fill_optimizer(tree)
    return tree["optimizer"]


def test_what_is_left_out_is_filled_and_what_is_said_stays() -> None:
    assert filled() == {"lr": 6.0e-4, "warmup_steps": 100, "min_lr": 6.0e-5}
    assert filled(lr=1e-3, warmup_steps=7, min_lr=0.0) == {"lr": 1e-3, "warmup_steps": 7, "min_lr": 0.0}
    assert filled(lr=1e-3)["min_lr"] == 1e-4


@pytest.mark.parametrize("scheme", RECIPES)
def test_a_scheme_has_its_own_rate_beside_pre_norm(scheme: str) -> None:
    assert scheme in SCHEMES
    assert filled(scheme)["lr"] == pytest.approx(filled()["lr"] * RECIPES[scheme].lr_factor, rel=0.05)


def test_the_rate_falls_with_the_width_and_a_scheme_of_ones_own_has_the_usual_one() -> None:
    assert [recipe_lr("mine", size) for size in (768, 2048, 4096)] == [6.0e-4, 2.2e-4, 1.1e-4]


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 0), (150, 15), (1000, 100), (25_000, 500), (10**6, 2000)])
def test_warmup_fits_every_length(steps: int, warmup: int) -> None:
    assert recipe_warmup("pre_norm", steps) == warmup < steps


@pytest.mark.parametrize(
    "broken",
    [
        *({"model": 3}, {"train": {"steps": "many"}}, {"optimizer": []}, {"model": {}}),
        {"model": {"hidden_size": 8, "residual": {"scheme": ["a", "list"]}}},
        {"model": {"hidden_size": 10**400}},
    ],
)
def test_a_broken_tree_is_left_to_the_validation(broken: dict[str, Any]) -> None:
    tree = {"model": {"hidden_size": 8}, "train": {"steps": 5}} | broken
    fill_optimizer(tree)
    assert broken.items() <= tree.items()


def test_a_sphere_without_a_bias_is_warned_of() -> None:
    (line,) = advice("geonorm", on_sphere=True, output_bias="none", counted=True)
    assert line.startswith("model.output_bias=none with the scheme geonorm")
    assert line.endswith("; unigram avoids it")
    (line,) = advice("geonorm", on_sphere=True, output_bias="none", counted=False)
    assert line.endswith("; unigram, on shards built by python -m tools.shards, avoids it")
    assert not advice("geonorm", on_sphere=True, output_bias="unigram", counted=True)
    assert not advice("pre_norm", on_sphere=False, output_bias="none", counted=True)
