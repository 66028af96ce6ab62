"""A small grid, and results that nobody had to train for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.sweep.grid import Grid, load_grid
from tools.sweep.plan import Planned, all_settings, plan
from tools.sweep.results import Result

SETTINGS = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.ffn_hidden_size": 48,
    "model.sequence_length": 32,
    "train.micro_batch": 4,
    "train.global_batch": 4,
    "train.steps": 8,
    "optimizer.warmup_steps": 2,
    "optimizer.min_lr": 0,
    "logging.every": 4,
    "validation.every": 4,
    "validation.samples": 8,
    "checkpoint.every": 0,
}
ENTROPY = 5.0


def content() -> dict[str, Any]:
    """Two variants, three rates, then two seeds at the best rate."""
    return {
        "title": "Small",
        "note": "Shows nothing.",
        "base": "base.yaml",
        "work": "work",
        "diverged_above_unigram": 0.1,
        "data": {"max_bytes": 300_000, "vocab_size": 600, "sequence_length": 32, "validation_fraction": 0.1},
        "settings": dict(SETTINGS),
        "variants": {
            "geonorm": {"model.residual.scheme": "geonorm"},
            "pre_norm": {"model.residual.scheme": "pre_norm"},
        },
        "stages": {
            "rates": {"vary": {"optimizer.lr": [0.001, 0.01, 0.1], "train.seed": [1]}},
            "seeds": {"take": {"optimizer.lr": "rates"}, "vary": {"train.seed": [2, 3, 4]}},
        },
    }


def write_grid(folder: Path, tree: Mapping[str, Any]) -> Path:
    """The grid and its base file below ``folder``; data and runs go there too."""
    (folder / "base.yaml").write_text(yaml.safe_dump({"optimizer": {"weight_decay": 0.1}}))
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(dict(tree) | {"work": str(folder / "work")}, sort_keys=False))
    return path


def small_grid(folder: Path) -> Grid:
    """The grid of :func:`content`."""
    return load_grid(write_grid(folder, content()))


def planned_run(grid: Grid, run_id: str, results: Mapping[str, Result]) -> Planned:
    """The state of one run."""
    (found,) = [planned for planned in plan(grid, results, None) if planned.run.id == run_id]
    return found


def add_result(grid: Grid, results: dict[str, Result], run_id: str, loss: float, **fields: Any) -> None:
    """Put the result of a run with this final loss into ``results``; ``fields`` replace others of it."""
    planned = planned_run(grid, run_id, results)
    values: dict[str, Any] = {
        "id": run_id,
        "stage": planned.run.stage,
        "variant": planned.run.variant,
        "status": "finished",
        "reason": None,
        "settings": all_settings(grid, planned.run, planned.taken),
        "steps": 8,
        "tokens": 1024,
        "validation": [(4, loss + 1), (8, loss)],
        "train": [(step, loss + 1 / step) for step in range(1, 9)],
        "grad_norm_max": 0.5,
        "steps_not_finite": 0,
        "seconds": 2.0,
        "machine": "a machine",
        "versions": {"python": "3"},
        "git_revision": "0123456789abcdef",
        "data": "f" * 64,
        "unigram_entropy": ENTROPY,
    }
    results[run_id] = Result(**values | fields)


def all_rates(grid: Grid) -> dict[str, Result]:
    """Results of the first stage: 0.01 is best for geonorm, 0.1 for pre_norm."""
    results: dict[str, Result] = {}
    losses = {"geonorm": {0.001: 4.0, 0.01: 3.0, 0.1: 3.5}, "pre_norm": {0.001: 4.5, 0.01: 4.25, 0.1: 3.75}}
    for variant, of_variant in losses.items():
        for rate, loss in of_variant.items():
            add_result(grid, results, f"rates/{variant}/lr={rate}/seed=1", loss)
    return results
