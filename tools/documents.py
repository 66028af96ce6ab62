"""Documents, and dealing them by their text."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import UserError

# Share of the documents that is held out where the user says nothing else.
VALIDATION_FRACTION = 0.02


@dataclass(frozen=True)
class Document:
    """One text, and for messages the place that it came from."""

    text: str
    source: str


def hash_fraction(text: str | bytes, purpose: str) -> float:
    """A number in [0, 1) that only the text decides, or the bytes of tokens.

    Equal texts fall on the same side of any threshold.

    Numbers for different purposes (at most 16 bytes long) are independent.
    """
    content = text.encode("utf-8") if isinstance(text, str) else text
    digest = hashlib.blake2b(content, digest_size=8, person=purpose.encode("ascii")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_validation(text: str | bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation split; duplicates never lie on both sides."""
    return hash_fraction(text, "validation") < fraction


def default_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def make_folder(folder: Path) -> None:
    """Make an output folder; UserError when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output folder {folder} cannot be made: {error.strerror}") from error
