"""``python -m pretrain`` with one thing more: every sample that the model is given is written down before it learns.

``FOLDER train CONFIG ...``: each process appends to a file of its own in the folder, a line of JSON for each step: the
step, its data-parallel rank and their number, and the samples.
"""

import json
import os
import sys
from pathlib import Path

import torch

from pretrain.__main__ import main
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.errors import run_cli


def record(folder: Path) -> None:
    """Have the engine's steps written down."""
    forward_backward = Engine.forward_backward

    def recorded(engine: Engine, micro_batches: list[MicroBatch], step: int) -> torch.Tensor:
        rows = [torch.cat([micro.tokens, micro.labels[:, -1:]], dim=1) for micro in micro_batches]
        line = json.dumps([step, engine.place.dp_rank, engine.place.dp_size, torch.cat(rows).tolist()])
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\n")
        return forward_backward(engine, micro_batches, step)

    Engine.forward_backward = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(sys.argv.pop(1)))
    run_cli(main)
