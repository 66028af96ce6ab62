"""From what the user named to files in a fixed order."""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import UserError
from tools.inputs.formats import FORMATS, suffix_of


@dataclass(frozen=True)
class InputFile:
    """One file of documents.

    Attributes:
        path: as the user reached it; messages show it.
        size: bytes.
        changed: time of its last change, ns; an interrupted build goes on only from unchanged inputs.
    """

    path: Path
    size: int
    changed: int


def find_inputs(named: Sequence[Path | str], output: Callable[[Path], bool] = lambda path: False) -> list[InputFile]:
    """The files behind files, folders and glob patterns, in the order named and sorted by name inside each.

    Of a folder all files of a known type are taken, hidden folders and hidden files left out; links to folders are
    followed.

    Args:
        named: by the user.
        output: tells what the program itself writes, which may lie in a folder of inputs and is none.

    Raises:
        UserError: a name matches nothing, a named file is of an unknown type, a folder has no file of a known type or a
            link to nothing, or a file is named twice.
    """
    found: list[Path] = []
    for name in named:
        found.extend(path for path in _matches(str(name)) if not output(path))
    known: dict[Path, Path] = {}
    for path in found:
        place = path.resolve()
        if place in known:
            raise UserError(f"input {path} is named twice; its documents would be in the data twice")
        known[place] = path
    files = []
    for path in found:
        status = path.stat()
        files.append(InputFile(path, status.st_size, status.st_mtime_ns))
    return files


def _matches(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        if not path.is_file() or suffix_of(path) is None:
            raise UserError(f"input {path} is none of the known types: {', '.join(FORMATS)}")
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))] if glob.has_magic(name) else []
    if not matches:
        raise UserError(f"input {name} does not exist" if not glob.has_magic(name) else f"input {name} matches nothing")
    return [file for match in matches for file in _matches(str(match))]


def _in_folder(folder: Path) -> list[Path]:
    """The files of known types under a folder."""

    def refuse(error: OSError) -> None:
        raise UserError(f"input folder {error.filename} cannot be read: {error.strerror}") from error

    files: list[Path] = []
    walked: set[str] = set()
    for current, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        place = os.path.realpath(current)
        # Where links lead round in a circle, or several ways to one folder.
        folders[:] = [] if place in walked else sorted(name for name in folders if not name.startswith("."))
        if place not in walked:
            files.extend(Path(current, name) for name in sorted(names) if not name.startswith("."))
        walked.add(place)
    usable = [file for file in files if suffix_of(file) is not None]
    for file in usable:
        if not file.is_file():
            raise UserError(f"input {file} is a link to nothing, or no file: remove or restore it")
    if not usable:
        raise UserError(f"input folder {folder} has no file of a known type: {', '.join(FORMATS)}")
    return usable
