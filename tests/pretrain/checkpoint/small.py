"""Checkpoints of a few tensors, without an engine: one process writes all of them."""

from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.writing import Job, Piece, write


def facts(step: int, **state: Any) -> dict[str, Any]:
    state = {"step": step, "callbacks": {}} | state
    return {"state": state, "adam_step": step, "config": {}, "data_fingerprint": "", "vocab_size": 1}


def tensors(step: int, numel: int = 24) -> dict[str, torch.Tensor]:
    base = torch.arange(2 * numel + 5, dtype=torch.float32) + step
    return {"fp32.a": base[5 : 5 + numel].view(4, -1), "exp_avg.a": base[5 + numel :].view(2, -1)}


def job(directory: Path, step: int, numel: int = 24, **state: Any) -> Job:
    """Two tensors, the first of them in two parts, all of them views."""
    first, second = tensors(step, numel).values()
    shape = tuple(first.shape)
    pieces = [
        Piece("fp32.a", shape, (0, 0), first[:3]),
        Piece("fp32.a", shape, (3, 0), first[3:]),
        Piece("exp_avg.a", tuple(second.shape), (0, 0), second),
    ]
    return Job(directory, step, pieces, facts(step, **state))


def saved(directory: Path, step: int, **state: Any) -> Path:
    assert write(job(directory, step, **state)) is None
    return directory / f"step-{step:08d}"
