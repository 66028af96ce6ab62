"""One rank of the schemes' test: ``OUT_FOLDER VARIANT LAYOUT [LAYOUT_AFTER_LOAD]``.

Trains one residual scheme for a few steps, saves in the middle, and goes on from there in the other layout.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext import SCHEMES
from pretrain import parallel
from pretrain.checkpoint import loading, saving, store
from pretrain.config import with_scheme_defaults
from pretrain.engine import Engine
from pretrain.launch import read_launch
from pretrain.schedule import learning_rate
from tests.pretrain import tiny
from tests.pretrain.checkpoint.small import facts
from tests.pretrain.parity_worker import full_gradients

STEPS, SAVED = 6, 3

VARIANTS: dict[str, dict[str, Any]] = {name: {"scheme": name} for name in SCHEMES} | {
    "p": {"scheme": "p", "p": 3.0},
    "pre_dyt": {"scheme": "pre_dyt", "dyt_embedding_scale": True},
    "geonorm, everything learned": {
        "scheme": "geonorm",
        "learn_alpha": True,
        "learn_angle_scale": True,
        "radius": "learned",
        "final_norm": "none",
    },
}


def start(variant: str, layout: str, recompute: str) -> tuple[Engine, Any, parallel.Place]:
    parallel.dissolve()
    model = {"residual": VARIANTS[variant], "recompute": recompute}
    config = with_scheme_defaults(tiny.config(layout, model=model))
    place = parallel.arrange(torch.device("cpu"), config.parallel, config.train.seed)
    return Engine(config, config.model, tiny.TOKEN_COUNTS, place), config, place


def main() -> None:
    folder, variant, layout, *later = Path(sys.argv[1]), *sys.argv[2:]
    parallel.start(read_launch(), tiny.LAYOUTS["one"], seed=0)
    results = {"trained": train(variant, layout, folder / variant if later else None)}
    if later:
        results["loaded"] = go_on(variant, later[0], folder / variant)
    if dist.get_rank() == 0:
        torch.save(results, folder / f"{variant} {layout}.pt")
    parallel.stop()


def train(variant: str, layout: str, checkpoints: Path | None) -> dict[str, Any]:
    engine, config, place = start(variant, layout, "none")
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        take_step(engine, config, place, step, result)
        if checkpoints and step + 1 == SAVED:
            saving.save(engine, checkpoints, SAVED, tiny.VOCAB, facts(SAVED))
    return result


def go_on(variant: str, layout: str, checkpoints: Path) -> dict[str, Any]:
    engine, config, place = start(variant, layout, "full")
    newest = store.newest(checkpoints)
    assert newest is not None
    loading.load(engine, newest, tiny.VOCAB, store.read_record(newest))
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(SAVED, STEPS):
        take_step(engine, config, place, step, result)
    return result


def take_step(engine: Engine, config: Any, place: parallel.Place, step: int, result: dict[str, Any]) -> None:
    share = engine.forward_backward(tiny.micro_batches(step, place.dp_rank, place.dp_size))
    if step == 0:
        result["gradients"] = full_gradients(engine)
    engine.step(learning_rate(step, config.train.steps, config.optimizer))
    result["losses"].append(float(engine.sum_shares(share)))
    result["norms"].append(float(engine.grad_norm()))


if __name__ == "__main__":
    main()
