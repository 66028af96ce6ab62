"""The types of input files, told by the ends of their names."""

from pathlib import Path
from typing import NamedTuple


class Format(NamedTuple):
    """What a file holds, ``json`` or ``text`` lines, ``parquet`` or ``tar``, and how it is compressed."""

    content: str
    compression: str


FORMATS: dict[str, Format] = {
    ".jsonl": Format("json", ""),
    ".jsonl.gz": Format("json", "gzip"),
    ".jsonl.zst": Format("json", "zstandard"),
    # C4 and others name compressed JSON lines so.
    ".json.gz": Format("json", "gzip"),
    ".json.zst": Format("json", "zstandard"),
    ".parquet": Format("parquet", ""),
    ".txt": Format("text", ""),
    ".txt.gz": Format("text", "gzip"),
    ".txt.zst": Format("text", "zstandard"),
    ".tar": Format("tar", ""),
}


def suffix_of(path: Path) -> str | None:
    """The key in ``FORMATS`` that a file's name ends with, if any."""
    return next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), None)
