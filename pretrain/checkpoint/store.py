"""Where checkpoints live, and when one counts: ``RUN/checkpoints/step-00000100`` appears only when it is complete.

A checkpoint is written into a hidden folder of its own and renamed once everything in it is on disk, so a folder with
the final name is whole, and writers that outlive a killed run write where nobody looks. It is removed the other way
round: first renamed, then deleted.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.checkpoint.files import DamageError, FileFacts, force_to_disk, new_file, open_file, require_size
from pretrain.checkpoint.record import RECORD, require_shape
from pretrain.errors import UserError

FORMAT = 4
"""Of the files; a checkpoint of another format is not read."""
_STEP = re.compile(r"step-(\d{8,})")
_LITTLE = 256 << 10
_PARTIAL, _REMOVED = ".partial-", ".removed-"
_BROKEN = (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError)


def require_writable(directory: Path) -> None:
    """Make the run folder and see that checkpoints can be written below it, and the little that every run writes.

    Raises:
        UserError: when they cannot.
    """
    try:
        checkpoints = checkpoint_folder(directory)
        checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=checkpoints) as probe:
            probe.write(bytes(_LITTLE))
            probe.flush()
    except OSError as error:
        raise UserError(f"run.dir={directory}: cannot write there: {error.strerror}") from None


def checkpoint_folder(directory: Path) -> Path:
    """Folder of a run's checkpoints."""
    return directory / "checkpoints"


@contextmanager
def locked_run(directory: Path) -> Iterator[bool]:
    """Hold the run folder for this job, and clear what killed runs left in it; the lock dies with the process.

    Yields whether this process got the lock; another process on this machine may hold it.
    """
    with (directory / ".lock").open("w") as lock:
        try:
            # A record lock is not inherited by forked writers, which may outlive a killed run.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        for prefix in (_PARTIAL, _REMOVED):
            for leftover in checkpoint_folder(directory).glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)  # an orphaned writer may still be in it; nobody reads it
        yield True


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints below ``directory``, newest first."""
    if not os.path.isdir(directory):  # pathlib's own raises where a name is too long
        return []
    found = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    return [found[step] for step in sorted(found, reverse=True)]


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step below ``directory``, or None."""
    return next(iter(checkpoints(directory)), None)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name tells."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The JSON record of a checkpoint, after a look at its files.

    Raises:
        DamageError: the record, or a file that it names, is missing, damaged, or of another size than it had.
        UserError: it is of another version's format.
    """
    try:
        record = _unsealed(checkpoint)
        require_shape(record)
        if f"step-{record['state']['step']:08d}" != checkpoint.name:
            raise ValueError(f"it was saved at step {record['state']['step']}")
        for name, facts in _files(record).items():
            require_size(checkpoint / name, facts.bytes)
    except _BROKEN as error:
        raise DamageError(f"{checkpoint} is damaged: {error}") from None
    return record


def recorded_files(checkpoint: Path) -> dict[str, FileFacts]:
    """Name -> size and checksum of a checkpoint's files; DamageError when its record does not tell."""
    try:
        return _files(_unsealed(checkpoint))
    except _BROKEN as error:
        raise DamageError(f"{checkpoint} is damaged: {error}") from None


def _unsealed(checkpoint: Path) -> dict[str, Any]:
    with open_file(checkpoint / RECORD) as stream:
        record = json.loads(stream.read())
    if not isinstance(record, dict):
        raise TypeError(f"{RECORD} is no record")
    if not isinstance(record.get("format"), int):
        raise ValueError(f"{RECORD} tells no format")
    if record["format"] != FORMAT:
        raise UserError(
            f"{checkpoint} has format {record['format']}, but this version reads {FORMAT}; use its own version"
        )
    if record.pop("crc32", None) != _seal(record):
        raise ValueError(f"{RECORD} is not as it was written")
    return record


def _seal(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _files(record: dict[str, Any]) -> dict[str, FileFacts]:
    files = {name: FileFacts(**facts) for name, facts in record["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{name} lies outside the checkpoint")
    return files


def new_partial(directory: Path, step: int) -> Path:
    """A new folder to write the checkpoint of ``step`` into; orphaned writers may still be in older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{step}-", dir=directory))


def publish(partial: Path, step: int, record: dict[str, Any], files: Mapping[str, FileFacts]) -> Path:
    """Make a checkpoint count whose ``files`` are on disk: write its record and give it its name, durably.

    Raises:
        OSError: the file system does not take them, or a file is not there in full.
    """
    for name, facts in files.items():
        if (found := (partial / name).stat().st_size) != facts.bytes:
            raise OSError(f"{name} has {found} bytes instead of {facts.bytes}: the nodes see different files")
    sealed = record | {"format": FORMAT, "files": {name: asdict(facts) for name, facts in files.items()}}
    sealed = json.loads(json.dumps(sealed))  # as it will be read back
    with new_file(partial / RECORD) as file:
        file.write(json.dumps(sealed | {"crc32": _seal(sealed)}, indent=1).encode())
    umask = os.umask(0)
    os.umask(umask)
    partial.chmod(0o777 & ~umask)  # a temporary folder is its owner's alone
    force_to_disk(partial)
    final = partial.parent / f"step-{step:08d}"
    partial.rename(final)
    force_to_disk(final.parent)
    return final


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that it counts no more, and is kept."""
    kept = checkpoint.with_name(f"{checkpoint.name}.damaged")
    count = 1
    while kept.exists():
        count += 1
        kept = checkpoint.with_name(f"{checkpoint.name}.damaged-{count}")
    checkpoint.rename(kept)
    force_to_disk(kept.parent)
    return kept


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, which counts no more from the first moment on; OSError when that fails."""
    doomed = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}")
    checkpoint.rename(doomed)
    force_to_disk(doomed.parent)
    shutil.rmtree(doomed)
