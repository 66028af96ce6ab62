"""One of several processes that share a cache: fetches a file and says so; keeps the lease until its input ends."""

import sys
from pathlib import Path

from pretrain.data.cache import Cache
from pretrain.data.sources import open_source
from pretrain.data.transfer import Patience, RemoteFile
from pretrain.errors import run_cli


def main() -> None:
    """Arguments: cache folder, bound in bytes, seconds of patience, URL of the folder, name, sha256, size."""
    folder, limit, timeout, url, name, sha256, size = sys.argv[1:]
    patience = Patience(float(timeout))
    cache = Cache(Path(folder), int(limit), patience)
    source = open_source(url, patience.read_timeout)
    lease = cache.fetch(RemoteFile(source, name, sha256, int(size), int(size)))
    print(lease.path, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    run_cli(main)
