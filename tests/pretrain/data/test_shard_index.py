import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.manifest import load_manifest
from pretrain.data.shard_index import IndexHeader, check_files, load_header, load_index, write_index
from pretrain.errors import UserError

HEADER = IndexHeader(
    version=2,
    tar="a.tar",
    tar_bytes=10_000,
    tar_sha256="t" * 64,
    tokenizer_sha256="m" * 64,
    eod_id=1,
    dtype="<u2",
    sample_length=33,
    samples=11,
    members=2,
)
OFFSETS, ROWS, CRC32 = [640, 2048], [8, 3], list(range(2**32 - 11, 2**32))


def written(folder: Path) -> tuple[Path, str]:
    path = folder / "a.idx"
    return path, write_index(path, HEADER, OFFSETS, ROWS, CRC32)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, sha256 = written(tmp_path)
    index = load_index(path, sha256)
    assert index.header == load_header(path) == HEADER
    assert (index.offsets.tolist(), index.rows.tolist(), index.crc32.tolist()) == (OFFSETS, ROWS, CRC32)
    for array in (index.offsets, index.rows, index.crc32):
        assert not array.flags.writeable


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    content = written(tmp_path)[0].read_bytes()
    assert content[:8] == b"SHARDIDX"
    length = int.from_bytes(content[8:16], "little")
    assert content[16 : 16 + length].startswith(b'{"dtype": "<u2"')
    start = -(-(16 + length) // 8) * 8
    assert np.frombuffer(content, "<u8", 2, start).tolist() == OFFSETS
    assert np.frombuffer(content, "<u8", 2, start + 16).tolist() == ROWS
    assert np.frombuffer(content, "<u4", 11, start + 32).tolist() == CRC32
    assert len(content) == start + 32 + 48


def test_an_index_is_mapped_not_read(tmp_path: Path) -> None:
    """A hundred million samples of crc32 cost no memory until they are asked for."""
    samples = 100_000_000
    path, _ = written(tmp_path)
    header = dataclasses.replace(HEADER, samples=samples, members=1, tar_bytes=10**12)
    write_index(path, dataclasses.replace(header, samples=8), [640], [8], CRC32[:8])
    short = path.read_bytes()
    head = short.replace(b'"samples": 8', b'"samples": %d' % samples)
    length = int.from_bytes(short[8:16], "little") + len(head) - len(short)
    text = head[16 : 16 + length]
    body = head[:8] + length.to_bytes(8, "little") + text + bytes(-(16 + length) % 8)
    body += (640).to_bytes(8, "little") + samples.to_bytes(8, "little")
    with path.open("wb") as file:
        file.write(body)
        file.truncate(len(body) + 4 * samples)
    before = resident()
    index = load_index(path)
    assert index.crc32[samples - 1] == 0
    assert resident() - before < 10 * 2**20


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def longer(content: bytes, digits: int) -> bytes:
    """An index that tells of longer samples, by so many digits taken from a hash."""
    text = b'"sample_length": 33'
    return content.replace(text, text + digits * b"3").replace(b"t" * 64, b"t" * (64 - digits))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:12], "shard index {path} is none, or damaged at its head: build the shards anew"),
        (lambda content: content[:60], "shard index {path} is none, or damaged at its head: build the shards anew"),
        (lambda content: b"{" + content[1:], "shard index {path} is none, or damaged at its head: build the shards an"),
        (lambda content: content[:8] + b"\xff" * 8 + content[16:], "shard index {path} is none, or damaged at its he"),
        (lambda content: content[:-8], "shard index {path} has {short} bytes instead of {size}: build the shards anew"),
        (lambda content: content.replace(b'"samples"', b'"ramples"'), "shard index {path} is damaged at samples: "),
        (lambda content: content.replace(b"<u2", b"<i2"), "shard index {path} is damaged at dtype: Input should be "),
        (lambda content: content.replace(b'on": 2', b'on": 3'), "shard index {path} has format version 3, this prog"),
        (
            lambda content: content.replace((8).to_bytes(8, "little") + (3).to_bytes(8, "little"), b"\xff" * 16),
            "shard index {path} contradicts itself: build the shards anew",
        ),
        (
            lambda content: longer(content, 20),
            "shard index {path} is damaged at sample_length: Input should be less than or equal to 1125899906842624",
        ),
        (lambda content: longer(content, 2), "shard index {path} contradicts itself: build the shards anew"),
        (
            lambda content: content.replace((2048).to_bytes(8, "little"), (9999).to_bytes(8, "little")),
            "shard index {path} contradicts itself: build the shards anew",
        ),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path, _ = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    with pytest.raises(UserError) as error:
        load_index(path)
    expected = message.format(path=path, size=len(content), short=len(content) - 8)
    assert str(error.value).startswith(expected)
    with pytest.raises(UserError, match=r"is not the one that the manifest|is none|is damaged|format version"):
        load_index(path, "0" * 64)


def test_arrays_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    for arrays in ((OFFSETS, ROWS, CRC32[:-1]), (OFFSETS[:1], ROWS, CRC32), (OFFSETS, [8, 4], CRC32)):
        with pytest.raises(ValueError, match="instead of"):
            write_index(tmp_path / "a.idx", HEADER, *arrays)
    assert not list(tmp_path.iterdir())


def test_the_index_of_another_tar_is_refused_at_the_start(own_copy: Path) -> None:
    manifest = load_manifest(own_copy)
    check_files(manifest)
    first, second = (own_copy / shard.file for shard in manifest.splits["train"].shards[:2])
    first.with_suffix(".idx").write_bytes(second.with_suffix(".idx").read_bytes())
    with pytest.raises(UserError) as error:
        check_files(manifest)
    assert str(error.value) == (
        f"{first}: its index says tar {second.name}, the manifest {first.name}; build or copy both again"
    )
