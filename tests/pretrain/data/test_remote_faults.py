"""Every kind of fault between a source and the cache, with its exact outcome, on real servers."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.data.transfer import Patience
from pretrain.errors import UserError
from tests.pretrain.data.remote import PATIENCE, files_in, noise, remote_file, small_cache
from tests.servers.fault_proxy import CERTIFICATE, Faults, fault_proxy
from tests.servers.http import HttpServer, http_server
from tests.servers.s3 import BUCKET, S3Server, variables

CONTENT = noise(3_000_000)
IMPATIENT = Patience(timeout=1)


@pytest.fixture(params=["http", "s3"])
def broken(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Faults]]:
    """The URL of a folder with the file ``data.bin`` on a server of either kind, and the faults before it."""
    if request.param == "http":
        (tmp_path / "served").mkdir()
        (tmp_path / "served" / "data.bin").write_bytes(CONTENT)
        with http_server(tmp_path / "served") as server, fault_proxy(server.port) as (port, faults):
            yield f"http://127.0.0.1:{port}", faults
        return
    s3: S3Server = request.getfixturevalue("s3")
    s3.client.put_object(Bucket=BUCKET, Key="faults/data.bin", Body=CONTENT)
    with fault_proxy(s3.port) as (port, faults):
        for name, value in variables(port).items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/faults", faults


@pytest.mark.parametrize("kind", ["reset", "truncate", "stall"])
def test_a_broken_connection_goes_on_where_it_broke(broken: tuple[str, Faults], tmp_path: Path, kind: str) -> None:
    url, faults = broken
    faults.kind, faults.times, faults.after_bytes = kind, 2, 1_000_000
    cache = small_cache(tmp_path)
    with_faults = cache.fetch(remote_file(url, "data.bin", CONTENT))
    assert with_faults.path.read_bytes() == CONTENT
    assert faults.hit == 2
    starts = [_range_start(request) for request in faults.requests]
    assert starts[0] == 0
    assert len(starts) == 3
    # A reset also takes what lies unread in the socket.
    assert 0 < starts[1] < starts[2] or (kind == "reset" and 0 <= starts[1] <= starts[2])
    assert list(files_in(cache)) == [f"files/{hashlib.sha256(CONTENT).hexdigest()}"]


def _range_start(request: bytes) -> int:
    lines = [line.lower() for line in request.split(b"\r\n")]
    (start,) = [line for line in lines if line.startswith(b"range:")] or [b"range: bytes=0-"]
    return int(start.removeprefix(b"range: bytes=").removesuffix(b"-"))


def test_503_twice_passes(broken: tuple[str, Faults], tmp_path: Path) -> None:
    url, faults = broken
    faults.kind, faults.times = "unavailable", 2
    assert small_cache(tmp_path).fetch(remote_file(url, "data.bin", CONTENT)).path.read_bytes() == CONTENT
    assert faults.hit == 2


@pytest.mark.parametrize("kind", ["unavailable", "stall", "reset"])
def test_a_source_that_stays_away_ends_in_one_line_after_the_set_time(
    broken: tuple[str, Faults], tmp_path: Path, kind: str
) -> None:
    url, faults = broken
    faults.kind = kind
    # An answer is waited for longer, so that it is the answer which is told, also on a slow machine.
    answer = PATIENCE if kind == "unavailable" else IMPATIENT
    cache, wanted = small_cache(tmp_path, patience=IMPATIENT), remote_file(url, "data.bin", CONTENT, answer)
    started = time.monotonic()
    with pytest.raises(UserError) as raised:
        cache.fetch(wanted)
    assert time.monotonic() - started >= IMPATIENT.timeout
    message = str(raised.value)
    assert message.startswith(f"{url}/data.bin: nothing arrived for 0.0167 minutes (")
    assert message.endswith("start again, or raise data.source_timeout_minutes")
    assert "\n" not in message
    if kind == "unavailable":
        assert "503 Slow Down" in message or "503 SlowDown" in message
    assert faults.hit > 2


def test_a_file_that_is_not_there_ends_at_once(broken: tuple[str, Faults], tmp_path: Path) -> None:
    url, faults = broken
    with pytest.raises(UserError, match=rf"{url}/absent.bin: the server answers 404 .*the file is there"):
        small_cache(tmp_path).fetch(remote_file(url, "absent.bin", CONTENT))
    assert len(faults.requests) == 1


def test_wrong_content_is_fetched_once_more(broken: tuple[str, Faults], tmp_path: Path) -> None:
    url, faults = broken
    faults.kind, faults.times, faults.after_bytes = "flip", 1, 2_000_000
    assert small_cache(tmp_path).fetch(remote_file(url, "data.bin", CONTENT)).path.read_bytes() == CONTENT
    assert len(faults.requests) == 2


def test_wrong_content_twice_ends_in_one_line(broken: tuple[str, Faults], tmp_path: Path) -> None:
    url, faults = broken
    other = noise(len(CONTENT), seed=1)
    cache = small_cache(tmp_path)
    with pytest.raises(UserError) as raised:
        cache.fetch(remote_file(url, "data.bin", other))
    digests = [hashlib.sha256(content).hexdigest()[:12] for content in (CONTENT, other)]
    assert str(raised.value) == (
        f"{url}/data.bin: its sha256 is {digests[0]}..., the manifest says {digests[1]}..., twice; "
        "restore the file on the server, or build the data set anew"
    )
    assert len(faults.requests) == 2
    assert not any(name.startswith("files/") for name in files_in(cache))


@pytest.mark.parametrize("more", [-1, 1])
def test_another_size_is_wrong_content(broken: tuple[str, Faults], tmp_path: Path, more: int) -> None:
    url, _ = broken
    wanted = CONTENT[:more] if more < 0 else CONTENT + b"x"
    with pytest.raises(UserError, match=rf"it has {len(CONTENT)} bytes instead of {len(wanted)}, twice"):
        small_cache(tmp_path).fetch(remote_file(url, "data.bin", wanted))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "data.bin").write_bytes(CONTENT)
    with http_server(tmp_path / "served") as running:
        yield running


def test_a_server_without_ranges_begins_again(server: HttpServer, tmp_path: Path) -> None:
    server.ranges = False
    with fault_proxy(server.port) as (port, faults):
        faults.kind, faults.times, faults.after_bytes = "truncate", 1, 1_000_000
        file = remote_file(f"http://127.0.0.1:{port}", "data.bin", CONTENT)
        assert small_cache(tmp_path).fetch(file).path.read_bytes() == CONTENT
    assert [wanted is None for _, wanted in server.log] == [True, False]


def test_a_server_without_ranges_that_always_breaks_off_ends(server: HttpServer, tmp_path: Path) -> None:
    server.ranges = False
    with fault_proxy(server.port) as (port, faults):
        faults.kind, faults.after_bytes = "truncate", 1_000_000
        file = remote_file(f"http://127.0.0.1:{port}", "data.bin", CONTENT, IMPATIENT)
        with pytest.raises(UserError, match=r"nothing arrived for 0\.0167 minutes"):
            small_cache(tmp_path, patience=IMPATIENT).fetch(file)


def test_an_answer_without_length_that_ends_early_goes_on(server: HttpServer, tmp_path: Path) -> None:
    server.lengths = False
    with fault_proxy(server.port) as (port, faults):
        faults.kind, faults.times, faults.after_bytes = "truncate", 1, 1_000_000
        file = remote_file(f"http://127.0.0.1:{port}", "data.bin", CONTENT)
        assert small_cache(tmp_path).fetch(file).path.read_bytes() == CONTENT
    assert len(server.log) == 2


def test_no_more_is_stored_than_the_manifest_says(server: HttpServer, tmp_path: Path) -> None:
    server.lengths = False
    cache = small_cache(tmp_path)
    with pytest.raises(UserError, match="it has more than 1000000 bytes, twice"):
        cache.fetch(remote_file(f"http://127.0.0.1:{server.port}", "data.bin", CONTENT[:1_000_000]))
    assert max(files_in(cache).values()) <= 1_000_000


def test_no_server(tmp_path: Path) -> None:
    with fault_proxy(1) as (port, _):
        pass
    with pytest.raises(UserError, match=r"nothing arrived for 0.0167 minutes \(.*Connection refused"):
        small_cache(tmp_path, patience=IMPATIENT).fetch(
            remote_file(f"http://127.0.0.1:{port}", "data.bin", CONTENT, IMPATIENT)
        )


@pytest.mark.parametrize(("kind", "variable"), [("https", "SSL_CERT_FILE"), ("s3", "AWS_CA_BUNDLE")])
def test_a_certificate_that_nobody_knows_is_refused_at_once_and_one_that_is_named_is_trusted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variable: str
) -> None:
    for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    upstream = (request.getfixturevalue("server") if kind == "https" else request.getfixturevalue("s3")).port
    with fault_proxy(upstream, tls=True) as (port, faults):
        url = f"https://127.0.0.1:{port}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        if kind == "s3":
            for name, value in variables(port).items():
                monkeypatch.setenv(name, value.replace("http://", "https://"))
            request.getfixturevalue("s3").client.put_object(Bucket=BUCKET, Key="tls/data.bin", Body=CONTENT)
            url = f"s3://{BUCKET}/tls"
        cache = small_cache(tmp_path)
        with pytest.raises(UserError) as raised:
            cache.fetch(remote_file(url, "data.bin", CONTENT))
        assert str(raised.value) == (
            f"{url}/data.bin: the server's certificate is not trusted (self-signed certificate); "
            f"name the file of its authority by {variable}"
        )
        assert (faults.connections, faults.requests) == (1, [])
        monkeypatch.setenv(variable, str(CERTIFICATE))
        assert cache.fetch(remote_file(url, "data.bin", CONTENT)).path.read_bytes() == CONTENT
