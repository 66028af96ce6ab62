"""Whole data sets on servers: read as from disk, told apart, and harmless when a stranger wrote them."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config import DataSettings
from pretrain.config_file import load_config
from pretrain.data import order as order_module
from pretrain.data.batches import Source, TrainingBatches
from pretrain.data.folder import Access
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.mixture import Mixture, Stage
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from pretrain.data.transfer import Patience
from pretrain.datasets import Dataset, require_room, shares_of
from pretrain.errors import UserError
from tests.launch import REPOSITORY
from tests.pretrain.data.small import SEQUENCE_LENGTH, random_set
from tests.servers.fault_proxy import fault_proxy
from tests.servers.http import HttpServer, http_server
from tests.servers.s3 import BUCKET, S3Server, variables


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(tmp_path / "cache", 10**9, Patience(timeout=120))


@pytest.fixture
def server(own_copy: Path) -> Iterator[HttpServer]:
    """Serves a copy of the small data set."""
    with http_server(own_copy) as running:
        yield running


def url_of(server: HttpServer) -> str:
    return f"http://127.0.0.1:{server.port}/manifest.json"


def samples(manifest: Manifest) -> np.ndarray:
    reader = ShardReader(manifest, "train", SEQUENCE_LENGTH)
    rows = reader.read_rows(np.arange(len(reader)))
    assert rows.sound.all()
    return rows.tokens


def test_a_data_set_on_http_reads_as_from_disk(manifest: Manifest, server: HttpServer, access: Access) -> None:
    remote = load_manifest(url_of(server), access)
    assert remote.fingerprint == manifest.fingerprint
    assert remote.tokenizer_file is not None
    assert manifest.tokenizer_file is not None
    assert remote.tokenizer_file.read_bytes() == manifest.tokenizer_file.read_bytes()
    assert np.array_equal(samples(remote), samples(manifest))
    with pytest.raises(UserError, match=rf"http://127.0.0.1:{server.port} is remote; .* copy it"):
        _ = remote.directory


def test_a_data_set_on_s3_reads_as_from_disk(
    manifest: Manifest, s3: S3Server, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.upload(manifest.directory, "plain/small set")
    for name, value in variables(s3.port).items():
        monkeypatch.setenv(name, value)
    remote = load_manifest(f"s3://{BUCKET}/plain/small%20set/manifest.json", access)
    assert np.array_equal(samples(remote), samples(manifest))


def test_a_file_url(manifest: Manifest) -> None:
    assert load_manifest(f"file://{manifest.directory}/manifest.json").fingerprint == manifest.fingerprint


def test_data_sets_with_equal_file_names_are_told_apart(
    manifest: Manifest, server: HttpServer, access: Access, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = random_set(tmp_path_factory.mktemp("other") / "shards", seed=1, train=60, validation=4)
    assert other.splits["train"].shards[0].file == manifest.splits["train"].shards[0].file
    with http_server(other.directory) as second:
        for _ in range(2):
            assert np.array_equal(samples(load_manifest(url_of(second), access)), samples(other))
            assert np.array_equal(samples(load_manifest(url_of(server), access)), samples(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: _shard(content).update(file="/etc/passwd"), "is no plain file name"),
        (lambda content: _shard(content).update(file="file:///etc/passwd"), "is no plain file name"),
        (lambda content: _shard(content).update(bytes=10**40), "damaged at splits.train.shards.0.bytes"),
        (lambda content: content.update(sequence_length=10**12), "samples do not fit the"),
        (lambda content: _shard(content).update(file="../secret.tar"), "is no plain file name"),
        (lambda content: _shard(content).update(file="pipe:touch owned"), "is no plain file name"),
        (lambda content: content.update(tokenizer_file=".."), "is no plain file name"),
        (lambda content: content.update(tokenizer_file="/etc/passwd"), "is no plain file name"),
        (lambda content: content.update(tokenizer_sha256="../../../secret"), "which is no sha256"),
        (lambda content: content.update(py="!!python/object/apply:os.system ['touch owned']"), "damaged at py"),
    ],
)
def test_a_strangers_manifest_reaches_nothing(
    server: HttpServer, access: Access, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    file = server.folder / "manifest.json"
    content = json.loads(file.read_bytes())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load_manifest(url_of(server), access)
    assert [path for path, _ in server.log] == ["/manifest.json"]


def _shard(content: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = content["splits"]["train"]["shards"][0]
    return shard


def test_a_strangers_hash_reaches_nothing(server: HttpServer, access: Access) -> None:
    file = server.folder / "manifest.json"
    content = json.loads(file.read_bytes())
    _shard(content).update(sha256="../../../secret")
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="which is no sha256"):
        samples(load_manifest(url_of(server), access))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "cos\nsystem\n(S'touch owned'\ntR."])
def test_a_manifest_that_is_none(server: HttpServer, access: Access, text: str) -> None:
    (server.folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=rf"manifest {url_of(server)} (is no JSON|has format)"):
        load_manifest(url_of(server), access)


def test_a_remote_shard_that_is_gone_is_no_damage(server: HttpServer, access: Access) -> None:
    remote = load_manifest(url_of(server), access)
    (server.folder / remote.splits["train"].shards[0].file).unlink()
    with pytest.raises(UserError, match="the server answers 404"):
        samples(remote)


def test_a_copy_spoilt_in_the_cache_is_brought_anew(manifest: Manifest, server: HttpServer, access: Access) -> None:
    remote = load_manifest(url_of(server), access)
    shard = remote.splits["train"].shards[1]
    samples(remote)
    copy = access.cache.folder / "files" / shard.sha256
    copy.write_bytes(bytes(shard.bytes))
    told: list[str] = []
    reader = ShardReader(remote, "train", SEQUENCE_LENGTH, told.append)
    rows = reader.read_rows(np.arange(len(reader)))
    assert rows.sound.all()
    assert np.array_equal(rows.tokens, samples(manifest))
    assert told == []


def test_what_the_next_block_needs_is_brought_ahead(
    manifest: Manifest, server: HttpServer, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "BLOCK_SAMPLES", 48)
    remote = load_manifest(url_of(server), access)
    reader = ShardReader(remote, "train", SEQUENCE_LENGTH)
    order = SampleOrder(reader.shard_sizes, seed=3)
    mixture = Mixture([Stage(0, tuple(shares_of([Dataset("small", remote)], SEQUENCE_LENGTH)))], seed=3)
    batches = TrainingBatches([Source(reader, order)], mixture, 2, 4, dp_rank=0, dp_size=1)
    batches.read(np.arange(4))
    soon = {remote.splits["train"].shards[number].sha256 for number in order.shards_from(0, 0)}
    assert len(soon) < len(remote.splits["train"].shards)
    deadline = time.monotonic() + 30
    while not soon <= (here := {path.name for path in (access.cache.folder / "files").iterdir()}):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    later = {shard.sha256 for shard in remote.splits["train"].shards} - soon
    assert not later & here


def test_the_shards_of_a_block_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "BLOCK_SAMPLES", 10)
    sizes = [7, 3, 11, 2, 9, 4]
    order, shard_of = SampleOrder(sizes, seed=1), np.repeat(np.arange(6), sizes)
    blocks = [(epoch, block) for epoch in range(3) for block in range(4)]
    for here, following in itertools.pairwise(blocks):
        needed: list[int] = []
        for epoch, block in (here, following):
            draws = np.arange(epoch * 36 + block * 10, epoch * 36 + min(block * 10 + 10, 36))
            assert {order.block_of(int(draw)) for draw in draws} == {(epoch, block)}
            needed += shard_of[order.sample_ids(draws)].tolist()
        assert set(order.shards_from(*here)) == set(needed)
        assert len(order.shards_from(*here)) == len(set(needed))


def test_a_cache_that_does_not_hold_a_block(server: HttpServer, access: Access, manifest: Manifest) -> None:
    remote = Dataset("small", load_manifest(url_of(server), access))
    settings = DataSettings(manifest="unused", cache_gb=1e-5)
    with pytest.raises(UserError, match=r"data.cache_gb=1e-05 does not hold .* raise it to at least 0.00\d+"):
        require_room([remote], settings, SEQUENCE_LENGTH)
    require_room([Dataset("small", manifest)], settings, SEQUENCE_LENGTH)
    require_room([remote], DataSettings(manifest="unused"), SEQUENCE_LENGTH)


def test_nobody_waits_for_a_source_once_the_run_ends(server: HttpServer, tmp_path: Path) -> None:
    access = Access(tmp_path / "cache", 10**9, Patience(timeout=600))
    with fault_proxy(server.port) as (port, faults):
        faults.kind = "unavailable"
        threading.Timer(0.5, access.close).start()
        with pytest.raises(UserError, match="not fetched, as the run is ending"):
            load_manifest(f"http://127.0.0.1:{port}/manifest.json", access)


def test_what_is_recorded_holds_no_secret() -> None:
    place = "https://user:secret@host/a/manifest.json?token=secret"
    settings = [f"data.manifest={place}", "run.dir=unused"]
    config = load_config(REPOSITORY / "configs/demo.yaml", settings)
    assert config.data.manifest == place
    assert config.model_dump(mode="json")["data"]["manifest"] == "https://***@host/a/manifest.json?***"
