"""Where checkpoints live, and when one counts: ``RUN/checkpoints/step-00000100`` appears only when it is complete.

A checkpoint is written into a hidden folder of its own and renamed once everything in it is on disk, so a folder with
the final name is whole, and writers that outlive a killed run write where nobody looks.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.errors import UserError

RECORD = "run.json"
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


@contextmanager
def locked_run(directory: Path) -> Iterator[None]:
    """Hold the run folder for this job, and clear what killed saves left in it; the lock dies with the process.

    Raises:
        UserError: when another process on this machine holds it, or the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(f"run.dir={directory}: cannot write there: {error.strerror}") from None
    with lock:
        try:
            # A record lock is not inherited by forked writers, which may outlive a killed run.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"run.dir={directory} is in use by another run; stop it or choose another run.dir"
            ) from None
        for leftover in directory.glob(f"*/{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # an orphaned writer may still be in it; nobody reads it
        yield


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step below ``directory``, or None."""
    if not directory.is_dir():
        return None
    found = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    return found[max(found)] if found else None


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The JSON record of a checkpoint: state, configuration, data fingerprint, versions.

    Raises:
        UserError: when it is missing or damaged.
    """
    path = checkpoint / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: the checkpoint is damaged ({error}); remove {checkpoint} to use the one before"
        ) from None
    assert isinstance(record, dict)
    return record


def new_partial(directory: Path, step: int) -> Path:
    """A new folder to write the checkpoint of ``step`` into; orphaned writers may still be in older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{step}-", dir=directory))


def publish(partial: Path, step: int, record: dict[str, Any]) -> Path:
    """Make a fully written checkpoint count: write its record, force everything to disk, give it its name."""
    (partial / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    for path in partial.iterdir():
        _force_to_disk(path)
    _force_to_disk(partial)
    final = partial.parent / f"step-{step:08d}"
    partial.rename(final)
    _force_to_disk(final.parent)
    return final


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
