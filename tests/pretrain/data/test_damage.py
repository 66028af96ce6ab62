"""Every kind of damage that a shard can have, and its exact outcome."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.data import reader as reader_module
from pretrain.data import shard_index as index_module
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.reader import Rows, ShardReader
from pretrain.data.shard_index import check_files, load_index
from pretrain.errors import UserError
from tests.pretrain.data.small import SEQUENCE_LENGTH

SHARD, MEMBERS, MEMBER_ROWS = 1, 6, 8
SHARD_ROWS = MEMBERS * MEMBER_ROWS
FIRST = SHARD * SHARD_ROWS  # id of the damaged shard's first sample


def tar_of(folder: Path) -> Path:
    return folder / f"small-train-{SHARD:06d}.tar"


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(place: int) -> Callable[[bytearray], object]:
    def change(content: bytearray) -> None:
        content[place] ^= 4

    return change


def zero(start: int, stop: int) -> Callable[[bytearray], object]:
    def change(content: bytearray) -> None:
        content[start:stop] = bytes(stop - start)

    return change


def read_all(folder: Path, length: int = SEQUENCE_LENGTH) -> tuple[Rows, list[str]]:
    lines: list[str] = []
    reader = ShardReader(load_manifest(folder), "train", length, lines.append)
    ids = np.arange(len(reader))
    first = reader.read_rows(ids)
    again = reader.read_rows(ids)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.sound, again.sound)
    return first, lines


def expect_bad(folder: Path, manifest: Manifest, bad: list[int]) -> list[str]:
    """These samples are holes, all others what they were; returns what was logged over two readings of all."""
    rows, lines = read_all(folder)
    sound, _ = read_all(manifest.directory)
    assert np.flatnonzero(~rows.sound).tolist() == bad
    assert (rows.tokens[~rows.sound] == manifest.eod_id).all()
    np.testing.assert_array_equal(rows.tokens[rows.sound], sound.tokens[rows.sound])
    return lines


@pytest.fixture
def offsets(own_copy: Path) -> list[int]:
    """Byte of each member's first sample in the shard to damage."""
    index = load_index(tar_of(own_copy).with_suffix(".idx"))
    assert index.rows.tolist() == [MEMBER_ROWS] * MEMBERS
    return index.offsets.tolist()


ROW_BYTES = 2 * (SEQUENCE_LENGTH + 1)


def test_a_flipped_byte_of_a_sample_costs_that_sample(own_copy: Path, manifest: Manifest, offsets: list[int]) -> None:
    place = offsets[2] + 3 * ROW_BYTES
    edit(tar_of(own_copy), flip(place + 40))
    check_files(load_manifest(own_copy))
    (line,) = expect_bad(own_copy, manifest, [FIRST + 2 * MEMBER_ROWS + 3])
    assert line.startswith(f"sample 19 of shard {tar_of(own_copy)} at byte {place} has crc32 ")
    with pytest.raises(UserError, match=rf"sample {FIRST + 19} of .* is damaged: restore its shard"):
        ShardReader(load_manifest(own_copy), "train", SEQUENCE_LENGTH).read(FIRST + 19)


@pytest.mark.parametrize("place", [0, 100, 148, 257])
def test_a_flipped_byte_of_a_member_header_costs_nothing(
    own_copy: Path, manifest: Manifest, offsets: list[int], place: int
) -> None:
    header = offsets[2] - 128 - 512  # of the tar; that of the .npy file lies between
    edit(tar_of(own_copy), flip(header + place))
    check_files(load_manifest(own_copy))
    assert expect_bad(own_copy, manifest, []) == []


def test_a_zeroed_member_costs_its_samples(own_copy: Path, manifest: Manifest, offsets: list[int]) -> None:
    edit(tar_of(own_copy), zero(offsets[4] - 128 - 512, offsets[4] + MEMBER_ROWS * ROW_BYTES))
    check_files(load_manifest(own_copy))
    first = FIRST + 4 * MEMBER_ROWS
    lines = expect_bad(own_copy, manifest, [*range(first, first + MEMBER_ROWS)])
    assert len(lines) == MEMBER_ROWS


@pytest.mark.parametrize("cut", [100, -300, -4000])
def test_a_truncated_tar_is_refused_at_the_start(own_copy: Path, manifest: Manifest, cut: int) -> None:
    """In its first header, in its trailer, in a member."""
    tar = tar_of(own_copy)
    size = tar.stat().st_size
    edit(tar, lambda content: content.__delitem__(slice(cut, None)))
    with pytest.raises(UserError) as error:
        check_files(load_manifest(own_copy))
    assert str(error.value) == f"{tar} has {tar.stat().st_size} bytes instead of {size}; build or copy it again"
    lines = expect_bad(own_copy, manifest, [*range(FIRST, FIRST + SHARD_ROWS)])
    assert lines == [f"shard {tar} has {tar.stat().st_size} bytes, its manifest says {size}"]


def test_a_tar_that_shrinks_while_it_is_read_costs_what_is_gone(own_copy: Path, manifest: Manifest) -> None:
    tar, lines = tar_of(own_copy), []
    reader = ShardReader(load_manifest(own_copy), "train", SEQUENCE_LENGTH, lines.append)
    assert reader.read_rows(np.arange(FIRST, FIRST + SHARD_ROWS)).sound.all()
    size = tar.stat().st_size
    with tar.open("r+b") as file:
        file.truncate(size - 4000)
    rows = reader.read_rows(np.array([0, FIRST + SHARD_ROWS - 1, FIRST + SHARD_ROWS]))
    assert rows.sound.tolist() == [True, False, True]
    assert (rows.tokens[1] == manifest.eod_id).all()
    assert lines == [f"shard {tar} has {size - 4000} bytes, its manifest says {size}"]


def test_a_missing_tar_is_refused_at_the_start_and_costs_its_samples_later(own_copy: Path, manifest: Manifest) -> None:
    tar_of(own_copy).unlink()
    with pytest.raises(UserError) as error:
        check_files(load_manifest(own_copy))
    assert str(error.value) == f"{tar_of(own_copy)} is missing, though {own_copy} lists it"
    lines = expect_bad(own_copy, manifest, [*range(FIRST, FIRST + SHARD_ROWS)])
    assert lines == [f"shard {tar_of(own_copy)} cannot be opened: No such file or directory"]


def test_the_index_of_another_tar_is_refused_at_the_start_and_costs_the_shard_later(
    own_copy: Path, manifest: Manifest
) -> None:
    index = tar_of(own_copy).with_suffix(".idx")
    index.write_bytes((own_copy / "small-train-000000.idx").read_bytes())
    with pytest.raises(UserError, match=r"its index says tar small-train-000000.tar, the manifest small-train-000001"):
        check_files(load_manifest(own_copy))
    lines = expect_bad(own_copy, manifest, [*range(FIRST, FIRST + SHARD_ROWS)])
    assert lines == [f"shard index {index} is not the one that the manifest describes: build the shards anew"]


def test_the_tar_of_another_index_costs_its_samples(own_copy: Path, manifest: Manifest) -> None:
    """Of the same size, so that nothing but the contents tells."""
    other = own_copy / "small-train-000000.tar"
    assert other.stat().st_size == tar_of(own_copy).stat().st_size
    tar_of(own_copy).write_bytes(other.read_bytes())
    check_files(load_manifest(own_copy))
    assert len(expect_bad(own_copy, manifest, [*range(FIRST, FIRST + SHARD_ROWS)])) == SHARD_ROWS


def test_a_damaged_index_costs_the_shard(own_copy: Path, manifest: Manifest) -> None:
    index = tar_of(own_copy).with_suffix(".idx")
    edit(index, flip(-3))
    lines = expect_bad(own_copy, manifest, [*range(FIRST, FIRST + SHARD_ROWS)])
    assert lines == [f"shard index {index} is not the one that the manifest describes: build the shards anew"]


def test_an_index_that_the_disk_does_not_give_costs_the_shard(
    own_copy: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, sha256 = tar_of(own_copy).with_suffix(".idx"), index_module.sha256_of_file

    def broken(path: Path) -> str:
        if path == index:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sha256(path)

    monkeypatch.setattr(index_module, "sha256_of_file", broken)
    lines = expect_bad(own_copy, manifest, [*range(FIRST, FIRST + SHARD_ROWS)])
    assert lines == [f"shard index {index} cannot be read: Input/output error"]


def test_a_short_sequence_is_bad_with_the_sample_it_was_cut_from(own_copy: Path, offsets: list[int]) -> None:
    edit(tar_of(own_copy), flip(offsets[0] + 1))
    rows, lines = read_all(own_copy, SEQUENCE_LENGTH // 4)
    assert np.flatnonzero(~rows.sound).tolist() == [*range(4 * FIRST, 4 * FIRST + 4)]
    assert len(lines) == 1


def test_what_was_misread_once_is_read_again(own_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flips on the way, not on the disk."""
    crc32, calls = reader_module.zlib_ng.crc32, []

    def misread(content: memoryview) -> int:
        calls.append(1)
        if len(calls) == 5:
            content[7] ^= 1
        return crc32(content)

    monkeypatch.setattr(reader_module.zlib_ng, "crc32", misread)
    lines: list[str] = []
    reader = ShardReader(load_manifest(own_copy), "train", SEQUENCE_LENGTH, lines.append)
    rows = reader.read_rows(np.arange(20))
    assert rows.sound.all()
    assert len(calls) == 21
    assert lines == []
