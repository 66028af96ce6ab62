"""The cache of remote files: bounded, shared by processes, safe from kills, never evicting what is in use."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.data.cache import Cache
from pretrain.data.prefetch import Prefetcher
from pretrain.data.transfer import Patience, RemoteFile
from pretrain.errors import UserError
from tests.launch import REPOSITORY
from tests.pretrain.data.remote import PATIENCE, files_in, noise, remote_file, small_cache
from tests.servers.fault_proxy import fault_proxy
from tests.servers.http import HttpServer, http_server

SIZE = 400_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    """Serves the files 0, 1, 2, 3, each of ``SIZE`` bytes."""
    (tmp_path / "served").mkdir()
    for seed in range(4):
        (tmp_path / "served" / str(seed)).write_bytes(noise(SIZE, seed))
    with http_server(tmp_path / "served") as running:
        yield running


def wanted(server: HttpServer, seed: int, patience: Patience = PATIENCE) -> RemoteFile:
    return remote_file(f"http://127.0.0.1:{server.port}", str(seed), noise(SIZE, seed), patience)


def digest(seed: int) -> str:
    return hashlib.sha256(noise(SIZE, seed)).hexdigest()


def worker(cache: Path, limit: int, url: str, seed: int, timeout: float = 20) -> "subprocess.Popen[str]":
    """A process that fetches the file ``seed`` and keeps it."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.pretrain.data.cache_worker", str(cache), str(limit), str(timeout), url),
            *(str(seed), digest(seed), str(SIZE)),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_file_is_fetched_once_and_then_read_from_the_cache(server: HttpServer, tmp_path: Path) -> None:
    for _ in range(2):
        cache = small_cache(tmp_path)
        assert cache.fetch(wanted(server, 1)).path.read_bytes() == noise(SIZE, 1)
    assert len(server.log) == 1
    assert files_in(cache) == {f"files/{digest(1)}": SIZE}


def test_equal_names_of_different_content_never_mix(server: HttpServer, tmp_path: Path) -> None:
    for folder, seed in (("first", 2), ("second", 3)):
        (server.folder / folder).mkdir()
        (server.folder / folder / "train-000000.tar").write_bytes(noise(SIZE, seed))
    cache = small_cache(tmp_path)
    for folder, seed in (("first", 2), ("second", 3), ("first", 2)):
        file = remote_file(f"http://127.0.0.1:{server.port}/{folder}", "train-000000.tar", noise(SIZE, seed))
        assert cache.fetch(file).path.read_bytes() == noise(SIZE, seed)
    assert len(server.log) == 2


def test_what_was_used_longest_ago_is_evicted(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path, limit_bytes=2 * SIZE)
    for seed in (0, 1, 0, 2):
        cache.fetch(wanted(server, seed)).close()
        time.sleep(0.02)  # the order of use is told by the files' times
    assert set(files_in(cache)) == {f"files/{digest(0)}", f"files/{digest(2)}"}
    assert len(server.log) == 3


def test_what_is_in_use_is_not_evicted(server: HttpServer, tmp_path: Path) -> None:
    patience = Patience(timeout=0.5)
    cache = small_cache(tmp_path, limit_bytes=2 * SIZE, patience=patience)
    held = [cache.fetch(wanted(server, seed)) for seed in (0, 1)]
    with pytest.raises(UserError, match=r"all of data.cache_gb=0.0008 is in use; raise it"):
        cache.fetch(wanted(server, 2, patience))
    held[0].close()
    cache.fetch(wanted(server, 2, patience))
    assert set(files_in(cache)) == {f"files/{digest(1)}", f"files/{digest(2)}"}


def test_a_lease_that_is_forgotten_ends(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path, limit_bytes=SIZE)
    for seed in range(3):
        cache.fetch(wanted(server, seed))
    assert set(files_in(cache)) == {f"files/{digest(2)}"}


def test_a_file_larger_than_the_cache(server: HttpServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.cache_gb=0.0004 is smaller than http://.*/1 \(0.0004 GB\); raise it"):
        small_cache(tmp_path, limit_bytes=SIZE - 1).fetch(wanted(server, 1))


def test_a_file_that_was_cut_off_on_this_disk_is_fetched_again(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    path = cache.fetch(wanted(server, 1)).path
    os.truncate(path, SIZE // 2)
    assert cache.fetch(wanted(server, 1)).path.read_bytes() == noise(SIZE, 1)


def test_a_discarded_file_is_fetched_again_while_its_readers_go_on(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    reader = cache.fetch(wanted(server, 1)).path.open("rb")
    cache.discard(wanted(server, 1))
    assert cache.fetch(wanted(server, 1)).path.read_bytes() == reader.read() == noise(SIZE, 1)
    assert len(server.log) == 2


@pytest.mark.parametrize("sha256", ["../../etc/passwd", "A" * 64, "a" * 63, "", "." * 64])
def test_a_hash_that_is_none_reaches_no_file(server: HttpServer, tmp_path: Path, sha256: str) -> None:
    known = wanted(server, 1)
    with pytest.raises(UserError, match="which is no sha256"):
        small_cache(tmp_path).fetch(RemoteFile(known.source, known.name, sha256, SIZE, SIZE))
    assert server.log == []


def test_processes_of_a_node_download_a_file_once(server: HttpServer, tmp_path: Path) -> None:
    with fault_proxy(server.port) as (port, faults):
        faults.kind, faults.times, faults.after_bytes = "truncate", 2, 150_000
        workers = [worker(tmp_path / "cache", 10 * SIZE, f"http://127.0.0.1:{port}", 1) for _ in range(3)]
        answers = [process.communicate(timeout=120) for process in workers]
    assert answers == [(f"{tmp_path / 'cache' / 'files' / digest(1)}\n", "")] * 3
    assert [start for _, start in server.log].count(None) == 1
    assert len(server.log) == 3


def test_another_process_keeps_what_it_uses_and_lets_go_when_killed(server: HttpServer, tmp_path: Path) -> None:
    patience = Patience(timeout=0.5)
    cache = small_cache(tmp_path, limit_bytes=SIZE, patience=patience)
    other = worker(cache.folder, SIZE, f"http://127.0.0.1:{server.port}", 1)
    assert other.stdout is not None
    assert other.stdout.readline()
    with pytest.raises(UserError, match="is in use"):
        cache.fetch(wanted(server, 2, patience))
    other.send_signal(signal.SIGKILL)
    other.communicate()
    cache.fetch(wanted(server, 2, patience))


def test_a_killed_download_counts_for_nothing_and_is_taken_up(server: HttpServer, tmp_path: Path) -> None:
    cache, part = small_cache(tmp_path), tmp_path / "cache" / "parts" / f"{digest(1)}.{SIZE}"
    with fault_proxy(server.port) as (port, faults):
        faults.kind, faults.after_bytes = "stall", 300_000
        killed = worker(cache.folder, 10 * SIZE, f"http://127.0.0.1:{port}", 1)
        wait_until(lambda: part.exists() and part.stat().st_size > 200_000)
        killed.kill()
        killed.communicate()
    had = part.stat().st_size
    assert not (cache.folder / "files" / digest(1)).exists()
    assert cache.fetch(wanted(server, 1)).path.read_bytes() == noise(SIZE, 1)
    assert server.log[-1] == ("/1", f"bytes={had}-")
    assert list(files_in(cache)) == [f"files/{digest(1)}"]


def test_a_part_spoilt_on_disk_is_fetched_anew(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    (cache.folder / "parts" / f"{digest(1)}.{SIZE}").write_bytes(bytes(SIZE // 2))
    assert cache.fetch(wanted(server, 1)).path.read_bytes() == noise(SIZE, 1)


def test_downloads_broken_off_make_room_first(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path, limit_bytes=2 * SIZE)
    cache.fetch(wanted(server, 0)).close()
    (cache.folder / "parts" / f"{digest(1)}.{SIZE}").write_bytes(b"begun")
    cache.fetch(wanted(server, 2))
    assert set(files_in(cache)) == {f"files/{digest(0)}", f"files/{digest(2)}"}


def test_files_that_others_put_into_the_cache_are_left_alone(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path, limit_bytes=SIZE)
    foreign = [cache.folder / "parts" / ".nfs000000000001", cache.folder / "files" / "notes.txt"]
    for file in foreign:
        file.write_bytes(b"x")
    for seed in (0, 1):
        cache.fetch(wanted(server, seed)).close()
    assert all(file.exists() for file in foreign)


def test_who_waits_for_another_process_tells_what_stops_it(server: HttpServer, tmp_path: Path) -> None:
    patience = Patience(timeout=1)
    cache = small_cache(tmp_path, patience=patience)
    with fault_proxy(server.port) as (port, faults):
        faults.kind = "unavailable"
        other = worker(cache.folder, 10 * SIZE, f"http://127.0.0.1:{port}", 1, timeout=60)
        wait_until(lambda: bool(faults.hit))
        with pytest.raises(UserError, match=r"nothing arrived for 0.0167 minutes \(503 Slow Down\)"):
            cache.fetch(wanted(server, 1, patience))
        other.kill()
        other.communicate()
    assert server.log == []


def test_files_wanted_soon_come_in_order_and_faults_wait_for_the_need(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path, limit_bytes=2 * SIZE)
    absent = RemoteFile(wanted(server, 0).source, "absent", "0" * 64, SIZE, SIZE)
    Prefetcher(cache, threads=1).aim([absent, wanted(server, 3), wanted(server, 2)])
    wait_until(lambda: len(files_in(cache)) == 2 and all(name.startswith("files/") for name in files_in(cache)))
    assert [path for path, _ in server.log] == ["/absent", "/3", "/2"]
    cache.fetch(wanted(server, 3))
    assert len(server.log) == 3
    with pytest.raises(UserError, match="404"):
        cache.fetch(absent)


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as raised:
        small_cache(tmp_path / "file")
    assert str(raised.value) == (
        f"data.cache_dir={tmp_path}/file/cache cannot be used: Not a directory; choose another folder by data.cache_dir"
    )


def test_a_full_disk(server: HttpServer, tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    # The kernel's own full disk takes the place of the download.
    (cache.folder / "parts" / f"{digest(1)}.{SIZE}").symlink_to("/dev/full")
    with pytest.raises(UserError) as raised:
        cache.fetch(wanted(server, 1))
    assert str(raised.value) == (
        f"data.cache_dir={cache.folder} cannot be used: No space left on device; "
        "free space there or lower data.cache_gb"
    )


def test_a_file_size_limit(server: HttpServer, tmp_path: Path) -> None:
    cache: Cache = small_cache(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    try:
        with pytest.raises(UserError, match="cannot be used: File too large"):
            cache.fetch(wanted(server, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert cache.fetch(wanted(server, 1)).path.read_bytes() == noise(SIZE, 1)
