"""Write a checkpoint: every rank its own part of the tensors, and global rank 0 makes the whole count."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.checkpoint import store
from pretrain.checkpoint.contents import Part, write_contents
from pretrain.checkpoint.files import FileFacts, new_file

T = TypeVar("T")

_BESIDE_TENSORS = 1 << 20
"""Bytes that a checkpoint may need beside its tensors."""


@dataclass(frozen=True)
class Piece:
    """A part of a global fp32 tensor that this rank writes; ``tensor`` is on any device, contiguous, a view or not."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Job:
    """A checkpoint to write.

    Attributes:
        directory: where it appears.
        pieces: this rank's.
        record: JSON-ready facts kept beside the tensors; global rank 0's counts.
    """

    directory: Path
    step: int
    pieces: Sequence[Piece]
    record: dict[str, Any]

    def failed(self, reason: str) -> str:
        """One line that says so."""
        return f"the checkpoint of step {self.step} could not be written to {self.directory}: {reason}"


@dataclass(frozen=True)
class Written:
    """What one rank wrote: its parts, and its file's name and facts."""

    parts: list[Part]
    files: dict[str, FileFacts]


def write(job: Job, group: dist.ProcessGroup | None = None) -> str | None:
    """Write a checkpoint; collective over the ``group`` of all ranks.

    Returns:
        None when it is durable, else one line on why it is not; the same on all ranks. Nothing is left of it then.
    """
    leads = dist.get_rank() == 0
    size = torch.tensor(sum(piece.tensor.nbytes for piece in job.pieces), device=_device_of(group))
    dist.all_reduce(size, group=group)
    opened = [_told(lambda: _open(job, int(size))) if leads else None]
    dist.broadcast_object_list(opened, src=0, group=group)
    partial = opened[0]
    if not isinstance(partial, Path):
        return job.failed(str(partial))
    file = partial / f"__{dist.get_rank()}_0.distcp"
    mine = _told(lambda: write_pieces(file, job.pieces)) if job.pieces else Written([], {})
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, found if leads else None, dst=0, group=group)
    verdict = [_finish(job, partial, found) if leads else None]
    dist.broadcast_object_list(verdict, src=0, group=group)
    return None if verdict[0] is None else job.failed(verdict[0])


def write_pieces(path: Path, pieces: Iterable[Piece]) -> Written:
    """Write one rank's file; takes memory for one piece where they are on another device, and none otherwise."""
    parts = []
    with new_file(path) as file, _without_inner_checksums():
        for piece in pieces:
            start = file.facts.bytes
            torch.save(_alone(piece.tensor), cast(IO[bytes], file))
            place = (path.name, start, file.facts.bytes - start)
            parts.append(Part(piece.key, piece.global_shape, piece.offset, tuple(piece.tensor.shape), *place))
    return Written(parts, {path.name: file.facts})


def _open(job: Job, size: int) -> Path:
    """A folder to write into; OSError where the file system has no room for ``size`` bytes of tensors."""
    partial = store.new_partial(job.directory, job.step)
    free = shutil.disk_usage(partial).free
    if free < size + _BESIDE_TENSORS:
        partial.rmdir()
        raise OSError(f"it takes {size / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free")
    return partial


def _finish(job: Job, partial: Path, found: list[Any]) -> str | None:
    """On global rank 0: publish the checkpoint, or remove what there is of it and return the first fault."""
    faults = [result for result in found if isinstance(result, str)]
    fault = faults[0] if faults else _told(lambda: _publish(job, partial, found))
    if fault is not None:
        shutil.rmtree(partial, ignore_errors=True)  # what stays of it counts as nothing and goes at the next start
    return fault


def _publish(job: Job, partial: Path, found: list[Any]) -> None:
    files = {name: facts for written in found for name, facts in written.files.items()}
    files |= write_contents(partial, [part for written in found for part in written.parts])
    store.publish(partial, job.step, job.record, files)


def _told(action: Callable[[], T]) -> T | str:
    """The action's result, or one line on how it failed: the other ranks must hear of it instead of waiting."""
    try:
        return action()
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU with a storage of its own size: torch.save writes a view's whole storage."""
    return torch.from_numpy(tensor.detach().cpu().numpy())


@contextlib.contextmanager
def _without_inner_checksums() -> Iterator[None]:
    """Let torch.save leave out its own checksums, which nothing reads: the whole file has one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
