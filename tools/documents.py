"""Documents and where they come from: reading them without losing any unnoticed, and dealing them by their text."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.files import partial_path, publish
from pretrain.errors import UserError

# Share of the documents that is held out where the user says nothing else.
VALIDATION_FRACTION = 0.02

_SHOWN = 10


@dataclass(frozen=True)
class Document:
    """One text, and for messages the place that it came from."""

    text: str
    source: str


class Skipped:
    """What could not be used: counted by reason, the first few shown on stderr, all listed in a file."""

    def __init__(self, listing: Path) -> None:
        """Start with none; ``listing`` is written at :meth:`report` if there is anything to list."""
        self.reasons: Counter[str] = Counter()
        self._listing = listing
        self._lines: list[str] = []

    def add(self, where: str, reason: str) -> None:
        """Note one file or line that is left out."""
        self.reasons[reason] += 1
        self._lines.append(f"{where}: {reason}")
        if len(self._lines) <= _SHOWN:
            print(f"skipped {self._lines[-1]}", file=sys.stderr)

    def report(self) -> None:
        """Print the counts and write the listing; an older listing goes away."""
        if not self._lines:
            self._listing.unlink(missing_ok=True)
            return
        partial_path(self._listing).write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")
        publish(self._listing)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items()))
        print(f"skipped {len(self._lines)}: {reasons}; all are listed in {self._listing}")


def hash_fraction(text: str, purpose: str) -> float:
    """A number in [0, 1) that only the text decides; equal texts fall on the same side of any threshold.

    Numbers for different purposes (at most 16 bytes long) are independent.
    """
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose.encode("ascii")).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_validation(text: str, fraction: float) -> bool:
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


def check_inputs(paths: Sequence[Path]) -> None:
    """UserError for the first path that :func:`read_documents` cannot read documents from."""
    for path in paths:
        if not path.exists():
            raise UserError(f"input {path} does not exist")
        if path.suffix not in _READERS or not path.is_file():
            raise UserError(
                f"input {path} is neither a .jsonl nor a .txt file; tools.corpus makes one of other sources"
            )


def read_documents(paths: Sequence[Path], skipped: Skipped) -> Iterator[Document]:
    """The documents of .jsonl files (one in the ``text`` field of each line) and .txt files (one in each)."""
    for path in paths:
        yield from _READERS[path.suffix](path, skipped)


def read_text_file(path: Path, skipped: Skipped, source: str | None = None) -> Iterator[Document]:
    """The one document that a text file is, if it is UTF-8 and not blank."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        skipped.add(str(path), f"unreadable ({error.strerror})")
    except UnicodeDecodeError:
        skipped.add(str(path), "not UTF-8")
    else:
        if text.strip():
            yield Document(text, source or str(path))
        else:
            skipped.add(str(path), "empty")


def read_jsonl_file(path: Path, skipped: Skipped) -> Iterator[Document]:
    """The documents of a .jsonl file; a bad line is skipped and named."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                text, fault = _parse_line(line)
                if fault:
                    skipped.add(where, fault)
                else:
                    yield Document(text, where)
    except OSError as error:
        skipped.add(str(path), f"unreadable ({error.strerror})")


def _parse_line(line: bytes) -> tuple[str, str]:
    """The text of a line of jsonl, and what is wrong with it (nothing: an empty string)."""
    if not line.strip():
        return "", "empty line"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except (ValueError, RecursionError):
        return "", "broken JSON"
    if not isinstance(record, dict) or "text" not in record:
        return "", "no text field"
    text = record["text"]
    if not isinstance(text, str):
        return "", "text is no string"
    if not text.strip():
        return "", "empty text"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", "not Unicode (half of a surrogate pair)"
    return text, ""


_READERS = {".jsonl": read_jsonl_file, ".txt": read_text_file}
