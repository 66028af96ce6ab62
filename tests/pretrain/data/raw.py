"""Tars of raw text for tests, as webdataset writes them, and damage to them."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import webdataset as wds

BLOCK = tarfile.BLOCKSIZE


def write_tar(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """Samples as webdataset's writer takes them: suffix -> content; keys count from 0."""
    with wds.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:06d}", **sample})
    return path


def write_texts(path: Path, texts: Iterable[str], suffix: str = "txt") -> Path:
    """One member for each text."""
    return write_tar(path, ({suffix: text if suffix == "txt" else {"text": text}} for text in texts))


def write_plain(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    """Members of any name; one that ends in a slash is a folder. In USTAR each has a header of one block."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            if name.endswith("/"):
                header.type = tarfile.DIRTYPE
            else:
                header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def header_of(path: Path, number: int) -> int:
    """The byte at which a member's own header begins."""
    with tarfile.open(path) as tar:
        return tar.getmembers()[number].offset_data - BLOCK


def damage(path: Path, at: int, content: bytes) -> Path:
    """Overwrite bytes."""
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    path.write_bytes(whole)
    return path


def cut(path: Path, at: int) -> Path:
    """Keep the first bytes."""
    path.write_bytes(path.read_bytes()[:at])
    return path
