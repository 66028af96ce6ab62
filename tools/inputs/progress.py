"""One line that tells how far a long reading is."""

import sys
import time
from dataclasses import dataclass, field

# Between two lines of a log that is no terminal.
_LOG_SECONDS = 30.0
_TERMINAL_SECONDS = 0.5


@dataclass
class Progress:
    """Writes to stderr, on a terminal over its own last line.

    Attributes:
        what: the work, first word of the line.
        total: bytes of all inputs, as they lie on disk.
        done: of them, before this process began; they say nothing about its speed.
    """

    what: str
    total: int
    done: int = 0
    _began: float = field(default_factory=time.monotonic)
    _told: float = field(default_factory=time.monotonic)
    _width: int = 0

    def tell(self, documents: int, text_bytes: int, read: int) -> None:
        """Say how many documents there are, MB of text a second, and the time left; does so now and then only.

        Args:
            documents: all in all.
            text_bytes: by this process.
            read: bytes of the inputs, all in all.
        """
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._told < (_TERMINAL_SECONDS if terminal else _LOG_SECONDS):
            return
        self._told = now
        line = progress_line(self.what, documents, text_bytes, now - self._began, read - self.done, self.total - read)
        self._width = max(self._width, len(line))
        print("\r" + line.ljust(self._width) if terminal else line, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line, if there is one on a terminal."""
        if self._width and sys.stderr.isatty():
            print(file=sys.stderr)
        self._width = 0


def progress_line(what: str, documents: int, text_bytes: int, seconds: float, read: int, remaining: int) -> str:
    """The line: ``read`` bytes of input took ``seconds``, ``remaining`` are left."""
    share = 100 * (1 - remaining / max(1, read + remaining))
    left = f", {_span(seconds * remaining / read)} left" if read > 0 else ""
    return f"{what}: {documents} documents, {text_bytes / 1e6 / max(seconds, 1e-9):.1f} MB/s, {share:.0f} %{left}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
