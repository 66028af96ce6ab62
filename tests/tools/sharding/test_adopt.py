"""Token shards that webdataset's own writer made."""

import io
import resource
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from pretrain.data.manifest import load_manifest
from pretrain.data.reader import ShardReader
from pretrain.errors import UserError
from tools.inputs import Fault, Reading, parse, raw_records
from tools.shards import main

LENGTH = 9


def write(path: Path, arrays: list[np.ndarray], key: str = "tokens.npy", **more: object) -> None:
    with wds.TarWriter(str(path)) as tar:
        for number, array in enumerate(arrays):
            tar.write({"__key__": f"{number:06d}", key: array, **more})


def rows(count: int, seed: int, dtype: str = "<u2") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, size=(count, LENGTH)).astype(dtype)


def index(folder: Path, *more: str) -> None:
    main(["index", str(folder), "--vocab-size", "500", "--eod-id", "0", *more])


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4"])
@pytest.mark.parametrize("out", [None, "beside"])
def test_foreign_shards_are_read_as_they_are(
    tmp_path: Path, dtype: str, out: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    many, single, held_out = rows(7, 1, dtype), rows(5, 2, dtype), rows(4, 3, dtype)
    write(folder / "a.000.tar", [many[:4], many[4:]])
    write(folder / "a.001.tar", list(single), json={"source": "x"})
    write(folder / "val.tar", [held_out])
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    where = tmp_path / out if out else folder
    index(folder, "--validation", "val*", *(["--out", str(where)] if out else []))
    described = load_manifest(where)
    for split, expected in (("train", np.concatenate([many, single])), ("validation", held_out)):
        reader = ShardReader(described, split, LENGTH - 1)
        np.testing.assert_array_equal([reader.read(number) for number in range(len(reader))], expected)
    counts = Counter(np.concatenate([many, single])[:, 1:].ravel().tolist())
    assert described.token_counts.tolist() == [counts[token] for token in range(500)]
    assert described.splits["train"].documents == counts[0]
    assert {name: (folder / name).read_bytes() for name in before} == before
    if out:
        assert {file.name for file in folder.iterdir()} == set(before)
    capsys.readouterr()
    main(["verify", str(where)])
    assert "is sound" in capsys.readouterr().out
    with pytest.raises(UserError) as error:
        index(folder, *(["--out", str(where)] if out else []))
    assert str(error.value) == f"{where}/manifest.json exists: choose another --out, or remove it"


def test_what_cannot_be_trained_on_is_refused_in_one_line(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    first = "member 000000.tokens.npy"
    for arrays, message in (
        ([rows(2, 1, "<i8")], f"{tar}: {first} holds <i8, not uint16, uint32 or int32"),
        ([rows(2, 1)[..., None]], f"{tar}: {first} has shape (2, 9, 1), not [samples, tokens] or [tokens] row by row"),
        (
            [rows(2, 1), rows(2, 1)[:, :5]],
            f"{tar}: member 000001.tokens.npy holds samples of 5 <u2, 000000.tokens.npy of 9 <u2",
        ),
        ([rows(2, 1) + np.uint16(500)], f"{tar}: {first} has token 999, outside the vocabulary of 500"),
        ([-rows(2, 1, "<i4") - 1], f"{tar}: {first} has token -500, outside the vocabulary of 500"),
    ):
        write(tar, arrays)
        with pytest.raises(UserError) as error:
            index(tmp_path)
        start, _, end = message.partition("has token ")
        assert str(error.value).startswith(start)
        assert end == "" or str(error.value).endswith("outside the vocabulary of 500")
    write(tar, [rows(2, 1)], **{"mask.npy": rows(2, 1)})
    with pytest.raises(UserError) as error:
        index(tmp_path)
    assert str(error.value) == f"{tar} has members mask.npy and tokens.npy: choose the one with tokens by --member"
    index(tmp_path, "--member", "tokens.npy")
    assert load_manifest(tmp_path).splits["train"].samples == 2


def test_damaged_tars_and_foreign_indices_are_refused(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write(tar, [rows(2, number) for number in range(4)])
    whole = tar.read_bytes()
    tar.write_bytes(whole[:1024] + b"\1" + whole[1025:])
    with pytest.raises(UserError) as error:
        index(tmp_path)
    assert str(error.value).startswith(f"{tar} is damaged or cut off")
    tar.write_bytes(whole)
    other = tmp_path / "a.idx"
    other.write_text("v1.2 4\n")
    with pytest.raises(UserError) as error:
        index(tmp_path)
    assert str(error.value) == f"{other} is there already and not ours: choose a folder for the indices by --out"
    with pytest.raises(UserError) as error:
        index(tmp_path, "--validation", "*.tar", "--out", str(tmp_path / "out"))
    assert str(error.value) == "--validation *.tar leaves no .tar for training"
    with pytest.raises(UserError) as error:
        index(tmp_path / "out", "--validation", "b*")
    assert "leaves no .tar for validation" in str(error.value)


def test_a_strangers_tar_writes_nothing_and_runs_nothing(tmp_path: Path) -> None:
    """Members with paths that lead out, links, a pickle: arrays are read where they lie, the rest is passed over."""
    folder, arrays = tmp_path / "deep" / "tars", rows(4, 1)
    folder.mkdir(parents=True)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, array in (("../../owned.npy", arrays[:1]), ("/owned.npy", arrays[1:])):
            content = io.BytesIO()
            np.save(content, array)
            entry = tarfile.TarInfo(name)
            entry.size = content.tell()
            content.seek(0)
            tar.addfile(entry, content)
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            entry = tarfile.TarInfo("../link.npy")
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    index(folder)
    described = load_manifest(folder)
    reader = ShardReader(described, "train", LENGTH - 1)
    np.testing.assert_array_equal(reader.read_rows(np.arange(4)).tokens, arrays)
    assert {path.name for path in tmp_path.rglob("*")} == {"deep", "tars", "a.tar", "a.idx", "manifest.json"}
    content = io.BytesIO()
    np.save(content, np.array([Path("owned")], dtype=object), allow_pickle=True)
    (folder / "manifest.json").unlink()
    with tarfile.open(folder / "a.tar", "w") as tar:
        entry = tarfile.TarInfo("a.npy")
        entry.size = content.tell()
        content.seek(0)
        tar.addfile(entry, content)
    with pytest.raises(UserError, match=r"a\.tar: member a\.npy "):
        index(folder)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"{'descr': '<u2', 'fortran_order': False, 'shape': (-2, -9), }", "has shape (-2, -9), not [samples, tokens]"),
        (b"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 9, }", "is no .npy file of version 1 or 2"),
        (b"(" * 5000, "is no .npy file of version 1 or 2"),
        (b"-" * 5000 + b"1", "is no .npy file of version 1 or 2"),
    ],
)
def test_a_broken_array_header_is_told(tmp_path: Path, header: bytes, fault: str) -> None:
    with wds.TarWriter(str(tmp_path / "a.tar")) as tar:
        content = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(36)
        tar.write({"__key__": "0", "npy": content})
    with pytest.raises(UserError) as error:
        index(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/a.tar: member 0.npy {fault}")


@pytest.mark.parametrize(
    ("written", "member"), [(tarfile.USTAR_FORMAT, 0), (tarfile.USTAR_FORMAT, 1), (tarfile.PAX_FORMAT, 0)]
)
def test_a_tar_that_leads_round_in_a_circle_is_damaged(tmp_path: Path, written: int, member: int) -> None:
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w", format=written) as writer:
        for number in range(2):
            content = io.BytesIO()
            np.save(content, rows(2, number))
            entry = tarfile.TarInfo(f"{number}.npy")
            entry.size, entry.mtime = content.tell(), 0.5  # no whole number, so that PAX has a header of its own
            content.seek(0)
            writer.addfile(entry, content)
    content = bytearray(tar.read_bytes())
    start = member * 1024
    header = content[start : start + 512]
    header[124:136] = b"\xff" * 8 + (-512).to_bytes(4, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    content[start : start + 512] = header
    tar.write_bytes(content)
    with pytest.raises(UserError) as error:
        index(tmp_path)
    assert str(error.value).startswith(f"{tar} is damaged or cut off")  # the rest is tarfile's, and each Python's own
    *_, last = [parse(raw, Reading()) for raw, _ in raw_records(tar, Reading())]
    assert isinstance(last, Fault)
    assert last.kind == "damaged or cut off (tar)"


def test_names_that_no_manifest_can_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write(tmp_path / "a:0.tar", [rows(2, 1)])
    with pytest.raises(UserError) as error:
        index(tmp_path, "--out", str(tmp_path / "out"))
    assert str(error.value) == "'a:0.tar' is no plain file name"
    assert [path.name for path in tmp_path.iterdir()] == ["a:0.tar"]


def test_a_link_to_nothing_in_the_place_of_a_tar(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [rows(2, 1)])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.tar").symlink_to(tmp_path / "gone.tar")
    with pytest.raises(UserError) as error:
        index(tmp_path, "--out", str(tmp_path / "out"))
    assert str(error.value) == f"{tmp_path}/out/a.tar is there already, and another file than {tmp_path}/a.tar"


def test_a_disk_that_takes_no_more_is_told_in_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [rows(2, 1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError) as error:
            index(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value) == f"{tmp_path}: File too large"
    assert not (tmp_path / "manifest.json").exists()
    index(tmp_path)
