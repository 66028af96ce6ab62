"""One of four ranks: ``FOLDER CASE...``. Trains a step of every case in tp 2 x pp 2, evaluates it, and saves it."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain import parallel
from pretrain.checkpoint import saving
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.megatron_ext.small import GPT2
from tests.pretrain import tiny

LAYOUT = "tp2pp2"
LEARNED = {"radius": "learned", "learn_alpha": True, "learn_angle_scale": True}
CASES: dict[str, dict[str, Any]] = {
    "geonorm": {"model": {"residual": {"scheme": "geonorm", **LEARNED}}},
    "ngpt_lerp": {"model": {"residual": {"scheme": "ngpt_lerp"}}},
    "peri_ln": {"model": {"residual": {"scheme": "peri_ln"}}},
    "pre_dyt": {"model": {"residual": {"scheme": "pre_dyt"}}},
    "gpt2": {"model": {**GPT2, "qk_norm": True, "residual": {"scheme": "pre_norm"}}},
    "bf16": {"train": {"precision": "bf16"}},
}
"""Every kind of parameter: in a residual, in the stream's entry, in a norm of another class, tied, biases."""


def config_of(case: str) -> Config:
    sections = CASES[case]
    return tiny.config(LAYOUT, **{**sections, "model": {"num_layers": 2, **sections.get("model", {})}})


def rows() -> torch.Tensor:
    """Samples [4, sequence + 1] whose every token counts."""
    return torch.randint(0, tiny.VOCAB, (4, tiny.SEQUENCE + 1), generator=torch.Generator().manual_seed(3))


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    place = parallel.start(read_launch(), tiny.LAYOUTS[LAYOUT], seed=0)
    batches = [
        MicroBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), torch.ones(2, tiny.SEQUENCE))
        for row in rows().split(2)
    ]
    losses = {}
    for case in cases:
        config = config_of(case)
        engine = Engine(config, config.model, tiny.TOKEN_COUNTS, place)
        engine.forward_backward(batches)
        engine.step(3e-3)
        losses[case] = engine.evaluate(batches)
        saving.save(engine, folder / case, 1, tiny.VOCAB, {})
    if dist.get_rank() == 0:
        torch.save(losses, folder / "losses.pt")
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
