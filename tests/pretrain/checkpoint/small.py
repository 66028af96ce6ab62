"""Checkpoints of a few tensors, without an engine: one process writes all of them."""

import io
import json
import os
import pickle
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.contents import read_contents
from pretrain.checkpoint.files import facts_of
from pretrain.checkpoint.record import RECORD
from pretrain.checkpoint.writing import Job, Piece, write
from pretrain.state import TrainState


def facts(step: int, **state: Any) -> dict[str, Any]:
    return {
        "state": TrainState(step=step, began=0.0).to_dict() | state,
        "adam_step": step,
        "config": {},
        "dp_size": 1,
        "data_fingerprint": "",
        "datasets": {},
        "tokenizer_sha256": "",
        "vocab_size": 1,
    }


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


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Make sizes and checksums those of what lies there, as who forges a checkpoint would; None removes a key."""
    record = json.loads((checkpoint / RECORD).read_text())
    del record["crc32"]
    record["files"] = {name: asdict(facts_of(checkpoint / name)) for name in record["files"]}
    record = {key: value for key, value in (record | changes).items() if value is not None}
    seal = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (checkpoint / RECORD).write_text(json.dumps(record | {"crc32": seal}))


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def forge_contents(checkpoint: Path, mark: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
    reseal(checkpoint)


def forge_tensors(checkpoint: Path, mark: Path) -> None:
    """Put an attack in the place of every tensor."""
    metadata = read_contents(checkpoint)
    for place in metadata.storage_data.values():
        attack = io.BytesIO()
        torch.save(Attack(mark), attack)
        content = attack.getvalue()
        with (checkpoint / place.relative_path).open("r+b") as stream:
            stream.seek(place.offset)
            place.length = len(content)
            place.offset = stream.seek(0, io.SEEK_END)
            stream.write(content)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(checkpoint)


def forge_common(checkpoint: Path, mark: Path) -> None:
    torch.save(Attack(mark), checkpoint / "common.pt")
    reseal(checkpoint)
