"""Token shards that webdataset's own writer made."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from pretrain.data.manifest import load_manifest
from pretrain.data.reader import ShardReader
from pretrain.errors import UserError
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
