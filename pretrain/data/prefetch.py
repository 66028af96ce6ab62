"""Threads that bring the files which will be wanted soon."""

import threading
from collections.abc import Sequence

from pretrain.data.cache import Cache
from pretrain.data.transfer import RemoteFile
from pretrain.errors import UserError

# One connection to an object store gives some 50 to 100 MB/s, and each process of a node has these.
THREADS = 2


class Prefetcher:
    """Brings files into a cache in the order of their need."""

    def __init__(self, cache: Cache, threads: int = THREADS) -> None:
        """Start the threads; they end with the process."""
        self._cache = cache
        self._wanted: list[RemoteFile] = []
        self._changed = threading.Condition()
        for number in range(threads):
            # Daemons: a process that ends must not wait for a download, which the next one takes up where it stood.
            threading.Thread(target=self._work, name=f"prefetch-{number}", daemon=True).start()

    def aim(self, files: Sequence[RemoteFile]) -> None:
        """Bring these, the first ones first, and forget what was asked for before and is not on its way yet."""
        with self._changed:
            self._wanted = list(files)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._wanted:
                    self._changed.wait()
                file = self._wanted.pop(0)
            try:
                self._cache.fetch_ahead(file)
            except UserError:
                # Nothing is lost: whoever needs the file meets the same fault, and tells it.
                continue
