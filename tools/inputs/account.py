"""The books of a reading: nothing vanishes without a count."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.data.files import partial_path, publish
from pretrain.errors import UserError
from tools.inputs.records import Fault

SHOWN = 10
LISTED = 1000


@dataclass
class Account:
    """Records read = documents + duplicates + the sum of ``dropped``.

    Attributes:
        strict: whether the first fault ends the program.
        records: read so far.
        documents: of them, kept.
        duplicates: left out because an earlier document has the same text.
        dropped: number of faults by kind.
        text_bytes: of the kept documents, UTF-8.
        listed: the first faults, one a line, at most ``LISTED``.
    """

    strict: bool = False
    records: int = 0
    documents: int = 0
    duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0
    listed: list[str] = field(default_factory=list)

    def drop(self, fault: Fault) -> None:
        """Count a record that gives no document, and show the first few; UserError when strict."""
        line = f"{fault.where}: {fault.kind}"
        if self.strict:
            raise UserError(f"{line} (--strict stops at the first bad input)")
        self.records += 1
        self.dropped[fault.kind] += 1
        if len(self.listed) < LISTED:
            self.listed.append(line)
        if self.dropped.total() <= SHOWN:
            print(f"dropped {line}", file=sys.stderr)

    def keep(self, text_bytes: int, documents: int = 1) -> None:
        """Count documents that are used."""
        self.records += documents
        self.documents += documents
        self.text_bytes += text_bytes

    def repeat(self, duplicates: int = 1) -> None:
        """Count documents whose text was there before."""
        self.records += duplicates
        self.duplicates += duplicates

    def report(self, listing: Path) -> None:
        """Print what was read and what became of it, and write the first faults to a file; an older one goes away."""
        parts = [f"{self.documents} documents"]
        if self.duplicates:
            parts.append(f"{self.duplicates} duplicates")
        parts += [f"{count} dropped as {kind}" for kind, count in sorted(self.dropped.items())]
        print(f"{self.records} records read: {', '.join(parts)}")
        if not self.listed:
            listing.unlink(missing_ok=True)
            return
        # Names of files and members need not be UTF-8.
        text = "".join(f"{line}\n" for line in self.listed)
        partial_path(listing).write_text(text, encoding="utf-8", errors="backslashreplace")
        publish(listing)
        more = self.dropped.total() - len(self.listed)
        print(f"the dropped are listed in {listing}" + (f", but for {more} more" if more else ""))
