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
FORMAT = 3
"""Of the files; a checkpoint of another format is not read."""
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"


def require_writable(directory: Path) -> None:
    """Make the run folder and see that checkpoints can be written below it.

    Raises:
        UserError: when they cannot.
    """
    try:
        checkpoints = checkpoint_folder(directory)
        checkpoints.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=checkpoints).close()
    except OSError as error:
        raise UserError(f"run.dir={directory}: cannot write there: {error.strerror}") from None


def checkpoint_folder(directory: Path) -> Path:
    """Folder of a run's checkpoints."""
    return directory / "checkpoints"


@contextmanager
def locked_run(directory: Path) -> Iterator[bool]:
    """Hold the run folder for this job, and clear what killed saves left in it; the lock dies with the process.

    Yields whether this process got the lock; another process on this machine may hold it.
    """
    with (directory / ".lock").open("w") as lock:
        try:
            # A record lock is not inherited by forked writers, which may outlive a killed run.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        for leftover in checkpoint_folder(directory).glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # an orphaned writer may still be in it; nobody reads it
        yield True


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step below ``directory``, or None."""
    if not directory.is_dir():
        return None
    found = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    return found[max(found)] if found else None


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The JSON record of a checkpoint, after a look at its files.

    Raises:
        UserError: when the record, or a file that it names, is missing, damaged, or of another size than it had.
    """
    try:
        record = json.loads((checkpoint / RECORD).read_text(encoding="utf-8"))
        missing = {"format", "state", "config", "data_fingerprint", "vocab_size", "adam_step", "files"} - set(record)
        if missing:
            raise ValueError(f"{RECORD} has no {', '.join(sorted(missing))}")
        if record["format"] != FORMAT:
            raise UserError(f"{checkpoint} has format {record['format']}, but this version reads {FORMAT}; use its own")
        if f"step-{record['state']['step']:08d}" != checkpoint.name:
            raise ValueError(f"it was saved at step {record['state']['step']}")
        for name, size in record["files"].items():
            if (found := (checkpoint / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} bytes instead of {size}")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{checkpoint} is damaged ({error}); remove it to go on from the one before") from None
    assert isinstance(record, dict)
    return record


def new_partial(directory: Path, step: int) -> Path:
    """A new folder to write the checkpoint of ``step`` into; orphaned writers may still be in older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{step}-", dir=directory))


def publish(partial: Path, step: int, record: dict[str, Any]) -> Path:
    """Make a fully written checkpoint count: write its record, force everything to disk, give it its name."""
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    (partial / RECORD).write_text(json.dumps(record | {"files": files}, indent=1), encoding="utf-8")
    umask = os.umask(0)
    os.umask(umask)
    partial.chmod(0o777 & ~umask)  # a temporary folder is its owner's alone
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
