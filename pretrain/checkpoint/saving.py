"""Save a run, at once or beside the training.

A save beside the training runs in a thread of every rank. It holds a copy of what it writes and talks over a group of
its own. A thread, not a forked process: forking is unsafe once CUDA and communication threads run, and a process that
outlives its killed rank would go on writing. Writing, checksums and waiting for the disk let other threads compute.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.checkpoint.fragments import sharded_state
from pretrain.checkpoint.writing import Job, Piece, write
from pretrain.deepspeed_compat import adam_step, create_adam_state
from pretrain.engine import Engine
from pretrain.errors import SharedError


def save(engine: Engine, directory: Path, step: int, vocab_size: int, record: dict[str, Any]) -> None:
    """Write the checkpoint of ``step`` below ``directory``; collective, returns when it is durable.

    Args:
        record: JSON-ready facts kept beside the tensors; global rank 0's counts.

    Raises:
        SharedError: it could not be written; nothing is left of it.
    """
    if fault := write(job_of(engine, directory, step, vocab_size, record)):
        raise SharedError(fault)


def job_of(engine: Engine, directory: Path, step: int, vocab_size: int, record: dict[str, Any]) -> Job:
    """What is to be written now, as views of what the next step changes; arguments as of :func:`save`."""
    create_adam_state(engine.deepspeed)
    shards = sharded_state(engine, vocab_size, saving=True).values()
    pieces = [Piece(shard.key, shard.global_shape, shard.global_offset, shard.data) for shard in shards]
    return Job(directory, step, pieces, record | {"adam_step": adam_step(engine.deepspeed)})


class HostCopy:
    """Room in host memory for this rank's part of a checkpoint, kept from save to save; page-locked with CUDA."""

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def of(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces as they are now; nothing but the next call changes them."""
        numel = sum(piece.tensor.numel() for piece in pieces)
        cuda = any(piece.tensor.is_cuda for piece in pieces)
        if self._room.numel() != numel:
            self._room = torch.empty(0)  # the old room is given back first
            self._room = torch.empty(numel, dtype=torch.float32, pin_memory=cuda)
        copies, start = [], 0
        for piece in pieces:
            room = self._room[start : start + piece.tensor.numel()].view(piece.tensor.shape)
            room.copy_(piece.tensor, non_blocking=True)
            copies.append(replace(piece, tensor=room))
            start += room.numel()
        if cuda:
            torch.cuda.synchronize()
        return copies


class Background:
    """One save at a time, in a thread of every rank."""

    def __init__(self, group: dist.ProcessGroup, tell: Callable[[Job, str | None], None]) -> None:
        """Begin with none.

        Args:
            group: all ranks, on the CPU, used for nothing else.
            tell: called in the thread, on every rank, with what :func:`write` returned.
        """
        self._group = group
        self._tell = tell
        self._room = HostCopy()
        self._thread: threading.Thread | None = None
        self._outcome: str | BaseException | None = None

    def begin(self, job: Job) -> None:
        """Copy the pieces and start to write; collective. The one before must have been waited for."""
        assert self._thread is None, "two saves at a time"
        copied = replace(job, pieces=self._room.of(job.pieces))
        # A daemon: a process that gives up waiting may end.
        self._thread = threading.Thread(target=self._run, args=(copied,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for; the same on all ranks."""
        return self._thread is None

    @property
    def is_done(self) -> bool:
        """Whether nothing is being written on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the save, if there is one, and leave its outcome for :meth:`wait`."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> str | None:
        """Wait for the save, if there is one: None or why it failed, as :func:`write` says.

        Raises:
            Exception: whatever ended the thread beside that, such as a lost connection to another rank.
        """
        if self._thread is None:
            return None
        self.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run(self, job: Job) -> None:
        try:
            self._outcome = write(job, self._group)
            self._tell(job, self._outcome)
        except BaseException as error:
            self._outcome = error
