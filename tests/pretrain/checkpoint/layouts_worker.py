"""One of two or four ranks: ``FOLDER``. Saves in some layouts and ZeRO stages and goes on from there in others.

Global rank 0 writes ``losses.json``: for each saved layout the losses of the run that stayed and of those that moved.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain import parallel
from pretrain.checkpoint import loading, saving, store
from pretrain.engine import Engine
from pretrain.launch import read_launch
from pretrain.parallel import Place
from pretrain.schedule import learning_rate
from tests.pretrain import tiny
from tests.pretrain.checkpoint.small import facts

SAVED, STEPS = 3, 23
MOVES = {
    4: {"tp2pp2sp": ["tp2pp2sp", "dp4"], "pp2vpp2dp2": ["tp2dp2:2"], "cp2tp2sp:3": ["cp2pp2vpp2"]},
    2: {
        "dp2:0": ["dp2:3"],
        "dp2:2": ["dp2:2", "tp2sp:offload"],
        "dp2:3": ["dp2:3", "pp2"],
        "dp2:offload": ["dp2:0"],
    },
}
"""Each ``layout`` or ``layout:stage``; without one it is ZeRO 1."""
ZERO = {"offload": {"stage": 1, "offload_optimizer": True}, **{str(stage): {"stage": stage} for stage in range(4)}}
LAYOUTS = tiny.LAYOUTS | {"dp4": tiny.LAYOUTS["one"]}


def start(case: str) -> tuple[Engine, Place]:
    parallel.dissolve()
    layout, _, zero = case.partition(":")
    config = tiny.config("one", model={"dropout": 0.0}, parallel=vars(LAYOUTS[layout]), zero=ZERO[zero or "1"])
    place = parallel.arrange(torch.device("cpu"), LAYOUTS[layout], config.train.seed)
    return Engine(config, config.model, tiny.TOKEN_COUNTS, place), place


def train(engine: Engine, place: Place, first: int, last: int) -> list[float]:
    settings = tiny.config("one").optimizer
    losses = []
    for step in range(first, last):
        share = engine.forward_backward(tiny.micro_batches(step, place.dp_rank, place.dp_size), step)
        engine.step(learning_rate(step, STEPS, settings))
        losses.append(float(engine.sum_shares(share)))
    return losses


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    parallel.start(read_launch(), tiny.LAYOUTS["one"], seed=0)
    found: dict[str, dict[str, list[float]]] = {}
    for saved, others in MOVES[dist.get_world_size()].items():
        engine, place = start(saved)
        train(engine, place, 0, SAVED)
        saving.save(engine, folder / saved, SAVED, tiny.VOCAB, facts(SAVED))
        found[saved] = {"stayed": train(engine, place, SAVED, STEPS)}
        checkpoint = folder / saved / f"step-{SAVED:08d}"
        for other in others:
            engine, place = start(other)
            loading.load(engine, checkpoint, tiny.VOCAB, store.read_record(checkpoint))
            found[saved][other] = train(engine, place, SAVED, STEPS)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(found))
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
