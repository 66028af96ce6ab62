"""Merging and indexing that are killed leave nothing that a reader would take, and end in the same bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from pretrain.data.manifest import Manifest, load_manifest
from pretrain.errors import UserError
from tests.pretrain.data.small import RANDOM_VOCABULARY, random_set
from tests.tools.sharding.kills import killed_after
from tools.sharding.adopt import Adoption, adopt
from tools.sharding.merge import merge
from tools.verify_shards import find_faults


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def written(folder: Path, seed: int) -> Manifest:
    """A data set of two shards and one."""
    return random_set(folder, seed, train=5, validation=2, samples_per_member=2, members_per_shard=2)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [written(tmp_path / name, seed).directory for seed, name in enumerate(("first", "second"))]


def killed_at_every_change(
    folder: Path, work: Callable[[Path], Manifest], prepare: Callable[[Path], object] = lambda out: None
) -> int:
    """Kill ``work``, which writes to the folder given, at each change of a file; the number of changes."""
    whole = folder / "whole"
    prepare(whole)
    work(whole)
    expected = contents(whole)
    changes = 0
    while True:
        out = folder / f"killed-{changes}"
        prepare(out)
        killed = killed_after(changes, lambda out=out: work(out))
        if not killed:
            assert contents(out) == expected
            return changes
        if (out / "manifest.json").exists():
            assert list(find_faults(load_manifest(out))) == [], changes
        else:
            with pytest.raises(UserError, match="does not exist"):
                load_manifest(out)
        try:
            work(out)
        except UserError as error:
            # Killed behind its last change: the data set is complete.
            assert str(error).startswith(f"{out}/manifest.json exists")  # noqa: PT017
        assert contents(out) == expected, changes
        changes += 1


@pytest.mark.parametrize("copy", [False, True])
def test_a_killed_merge_starts_over_to_the_same_bytes(parts: list[Path], tmp_path: Path, copy: bool) -> None:
    before = [contents(part) for part in parts]
    assert killed_at_every_change(tmp_path, lambda out: merge(parts, out, "both", copy)) > 20
    assert [contents(part) for part in parts] == before


def test_what_an_interrupted_merge_of_others_left_goes_away(parts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert killed_after(20, lambda: merge(parts, out, "both", False))
    assert not (out / "manifest.json").exists()
    third = written(tmp_path / "third", 3).directory
    merge([third], out, "both", False)
    merge([third], tmp_path / "fresh", "both", False)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_merge_spares_the_shards_of_an_unfinished_build(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    shard = tmp_path / "out" / "both-train-000000.tar"
    shard.write_bytes(b"of another build")
    with pytest.raises(UserError) as error:
        merge(parts, tmp_path / "out", "both", False)
    assert str(error.value) == (
        f"{tmp_path}/out holds shards such as {shard.name} but no manifest: choose another --out or --name"
    )
    assert contents(tmp_path / "out") == {shard.name: b"of another build"}


@pytest.mark.parametrize("beside", [False, True])
def test_a_killed_index_starts_over_to_the_same_bytes(tmp_path: Path, beside: bool) -> None:
    """In the folder of the tars, and in one of its own."""
    generator, tars = np.random.default_rng(0), tmp_path / "tars"
    tars.mkdir()
    for number in range(4):
        with wds.TarWriter(str(tars / f"{number}.tar"), mtime=0) as tar:
            tar.write({"__key__": f"{number}", "tokens.npy": generator.integers(0, 500, (3, 9)).astype("<u2")})

    def work(out: Path) -> Manifest:
        folder, other = (tars, out) if beside else (out, None)
        return adopt(Adoption(folder=folder, out=other, vocabulary=RANDOM_VOCABULARY, validation=["3.tar"]))

    before = contents(tars)
    prepare = None if beside else lambda out: shutil.copytree(tars, out)
    assert killed_at_every_change(tmp_path, work, *filter(None, [prepare])) > 8
    assert contents(tars) == before
