"""A tiny run for tests: configuration, layouts and very uneven synthetic batches."""

import dataclasses
from typing import Any

import torch

from megatron_ext import ParallelSettings
from pretrain.config import Config
from pretrain.data.batch import MicroBatch

VOCAB = 300  # needs padding for every tensor-parallel size
SEQUENCE = 32
MICRO_BATCH = 2
GLOBAL_BATCH = 8
EOD = 0
TOKEN_COUNTS = [max(1, 10_000 // (token + 1)) for token in range(VOCAB)]

LAYOUTS = {
    "one": ParallelSettings(),
    "dp2": ParallelSettings(),
    "tp2": ParallelSettings(tp=2),
    "tp2sp": ParallelSettings(tp=2, sp=True),
    "pp2": ParallelSettings(pp=2),
    "pp2vpp2": ParallelSettings(pp=2, vpp=2),
    "tp2pp2vpp2sp": ParallelSettings(tp=2, pp=2, vpp=2, sp=True),
    "pp2vpp2dp2": ParallelSettings(pp=2, vpp=2),
    "tp2dp2sp": ParallelSettings(tp=2, sp=True),
    "tp2pp2vpp2dp2sp": ParallelSettings(tp=2, pp=2, vpp=2, sp=True),
    "cp2tp2pp2sp": ParallelSettings(cp=2, tp=2, pp=2, sp=True),
    "cp2": ParallelSettings(cp=2),
    "cp4": ParallelSettings(cp=4),
    "cp2dp2": ParallelSettings(cp=2),
    "cp2tp2sp": ParallelSettings(cp=2, tp=2, sp=True),
    "cp2pp2": ParallelSettings(cp=2, pp=2),
    "cp2pp2vpp2": ParallelSettings(cp=2, pp=2, vpp=2),
    "tp2pp2": ParallelSettings(tp=2, pp=2),
    "tp2pp2sp": ParallelSettings(tp=2, pp=2, sp=True),
    "pp2dp2": ParallelSettings(pp=2),
    "tp2dp2": ParallelSettings(tp=2),
    "tp2pp2dp2": ParallelSettings(tp=2, pp=2),
    "tp2pp2dp2sp": ParallelSettings(tp=2, pp=2, sp=True),
    "pp4": ParallelSettings(pp=4),
    "pp4dp2": ParallelSettings(pp=4),
}


def config(layout: str, **sections: dict[str, Any]) -> Config:
    """Four layers with grouped queries; ``sections`` replace settings, e.g. ``model={"tie_embeddings": True}``."""
    tree: dict[str, Any] = {
        "run": {"dir": "unused"},
        "data": {"manifest": "unused"},
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
            "sequence_length": SEQUENCE,
            "vocab_size": VOCAB,
        },
        "train": {
            "steps": 20,
            "micro_batch": MICRO_BATCH,
            "global_batch": GLOBAL_BATCH,
            "precision": "fp32",
        },
        # A small gradient's sign must not decide an update: rounding would grow over the steps.
        "optimizer": {"lr": 3e-3, "warmup_steps": 5, "clip": 0.5, "epsilon": 1e-4},
        "parallel": dataclasses.asdict(LAYOUTS[layout]),
    }
    for name, settings in sections.items():
        tree[name] = {**tree.get(name, {}), **settings}
    return Config.model_validate(tree)


def micro_batches(
    step: int, dp_rank: int, dp_size: int, ends_below: int = 0, micro_batch: int = MICRO_BATCH
) -> list[MicroBatch]:
    """One rank's micro batches of a step; the last samples are masked almost or wholly, the first not at all.

    A token below `ends_below` becomes an end of document, so that documents are short.
    """
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    rows[rows < ends_below] = EOD
    keep = torch.tensor([1.0, 0.9, 0.7, 0.5, 0.2, 0.1, 0.03, 0.0])
    mask = (torch.rand(GLOBAL_BATCH, SEQUENCE, generator=generator) < keep[:, None]).float()
    slots = GLOBAL_BATCH // dp_size
    return [
        MicroBatch(
            rows[first : first + micro_batch, :-1].contiguous(),
            rows[first : first + micro_batch, 1:].contiguous(),
            mask[first : first + micro_batch],
        )
        for first in range(dp_rank * slots, (dp_rank + 1) * slots, micro_batch)
    ]
