"""Raw text from a server that fails: the same documents, or one line."""

from pathlib import Path

import pytest

from pretrain.data.raw_text import arrivals, losses
from pretrain.data.shard_bytes import Opener
from pretrain.data.transfer import Patience
from pretrain.errors import UserError
from tests.pretrain.data import raw
from tests.servers.fault_proxy import fault_proxy
from tests.servers.http import http_server
from tests.servers.s3 import BUCKET, S3Server, variables

TEXTS = [f"text {number} " * 2000 for number in range(100)]


def read(place: str, patience: float = 4) -> list[str | None]:
    with Opener(Patience(patience)).open(place) as shard:
        found = [arrival.text for arrival in arrivals(shard, "text")]
    assert losses(shard.census, shard.where, len(found)).line == ""
    return found


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connections_are_taken_up_where_they_broke(tmp_path: Path, ranges: bool) -> None:
    raw.write_texts(tmp_path / "a b.tar", TEXTS)
    with http_server(tmp_path) as server, fault_proxy(server.port) as (port, faults):
        server.ranges = ranges
        faults.kind, faults.times, faults.after_bytes = "reset+truncate+unavailable+stall", 5, 300_000
        assert read(f"http://127.0.0.1:{port}/a%20b.tar") == TEXTS
        assert faults.hit == 5


def test_s3(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.write_texts(tmp_path / "a.tar", TEXTS)
    s3.upload(tmp_path, "raw")
    with fault_proxy(s3.port) as (port, faults):
        for name, value in variables(port).items():
            monkeypatch.setenv(name, value)
        faults.kind, faults.times, faults.after_bytes = "reset+truncate", 3, 300_000
        assert read(f"s3://{BUCKET}/raw/a.tar") == TEXTS
        assert faults.hit == 3


def test_a_source_that_stays_away(tmp_path: Path) -> None:
    raw.write_texts(tmp_path / "a.tar", TEXTS)
    with http_server(tmp_path) as server, fault_proxy(server.port) as (port, faults):
        faults.kind = "unavailable"
        with pytest.raises(UserError) as caught:
            read(f"http://user:secret@127.0.0.1:{port}/a.tar", 0.5)
    assert str(caught.value).startswith(f"http://127.0.0.1:{port}/a.tar: nothing arrived for 0.00833 minutes (503")


def test_a_shard_that_changes_while_it_is_read(tmp_path: Path) -> None:
    raw.write_texts(tmp_path / "a.tar", TEXTS)
    with http_server(tmp_path) as server, fault_proxy(server.port) as (port, faults):
        faults.kind, faults.times, faults.after_bytes = "truncate", 1, 300_000
        with Opener(Patience(4)).open(f"http://127.0.0.1:{port}/a.tar") as shard:
            found = arrivals(shard, "text")
            next(found)
            raw.write_texts(tmp_path / "a.tar", TEXTS[:90])
            with pytest.raises(UserError, match="shards must not change while a run reads them"):
                list(found)


def test_a_missing_shard(tmp_path: Path) -> None:
    with http_server(tmp_path) as server, pytest.raises(UserError, match=r"a.tar: the server answers 404"):
        read(f"http://127.0.0.1:{server.port}/a.tar")
