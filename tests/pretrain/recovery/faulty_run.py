"""``python -m pretrain`` with a fault: one rank's gradient is infinite in the step that takes a certain sample.

``GLOBAL_RANK DRAW train CONFIG ...``
"""

import os
import sys
from typing import Any

import torch

from pretrain.__main__ import main
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.errors import run_cli
from pretrain.feed import Feed
from pretrain.state import TrainState


def plant(global_rank: int, draw: int) -> None:
    """Have the first parameter of that rank get an infinite gradient whenever the global batch holds ``draw``."""
    fetch, build = Feed.fetch, Engine.__init__
    here = {"faulty": False}

    def fetched(feed: Feed, state: TrainState) -> list[MicroBatch]:
        draws = state.data.draws(state.consumed_samples, feed._batches.global_batch)
        here["faulty"] = os.environ["RANK"] == str(global_rank) and draw in draws
        return fetch(feed, state)

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, torch.inf) if here["faulty"] else gradient

    def built(engine: Engine, *arguments: Any, **named: Any) -> None:
        build(engine, *arguments, **named)
        next(engine.module.parameters()).register_hook(spoiled)

    Feed.fetch = fetched  # type: ignore[method-assign]
    Engine.__init__ = built  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(int(sys.argv.pop(1)), int(sys.argv.pop(1)))
    run_cli(main)
