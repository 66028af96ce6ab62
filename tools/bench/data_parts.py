"""Runs the parts of the benchmark `data` one after the other."""

import argparse
import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

from pretrain.errors import UserError
from tools.bench.data import PARTS
from tools.bench.report import Report

LIBRARIES = ("numpy", "webdataset", "megatron-core", "mosaicml-streaming", "sentencepiece", "zlib-ng")


@dataclass(frozen=True)
class Section:
    """What a part found.

    Attributes:
        text: a table and what has to be known to read it.
        results: the same and every single timing, as JSON values.
    """

    text: str
    results: dict[str, Any]


class Part(Protocol):
    """A module of :data:`tools.bench.data.PARTS`."""

    def measure(self, arguments: argparse.Namespace, folder: Path) -> Section:
        """Measure within an empty folder."""


def run(arguments: argparse.Namespace) -> Report:
    """Measure the parts that are asked for.

    Raises:
        UserError: the folder for the files cannot be used.
    """
    sections: dict[str, Section] = {}
    for name in arguments.only:
        with _empty_folder(arguments.folder) as folder:
            part = cast(Part, importlib.import_module(PARTS[name]))
            sections[name] = part.measure(arguments, folder)
    installed = versions()
    texts = [f"{name}: {section.text}" for name, section in sections.items()]
    texts.append(", ".join(f"{library} {version or 'absent'}" for library, version in installed.items()))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "folder")}
    return Report(
        "\n\n".join(texts),
        {name: section.results for name, section in sections.items()},
        settings | {"versions": installed},
    )


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None for what is not installed."""
    found: dict[str, str | None] = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = None
    return found


@contextlib.contextmanager
def _empty_folder(parent: Path | None) -> Iterator[Path]:
    try:
        temporary = tempfile.TemporaryDirectory(prefix="bench-data-", dir=parent)
    except OSError as error:
        raise UserError(f"--folder {parent}: {error.strerror}; name a folder that can be written") from error
    # What the tools print belongs to no table.
    with temporary as folder, contextlib.redirect_stdout(sys.stderr):
        yield Path(folder)
