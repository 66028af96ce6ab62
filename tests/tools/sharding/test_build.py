"""Builds that are killed, repeated, divided among processes and fed bad input end in the bytes of one that was not."""

import dataclasses
import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.manifest import Manifest, load_manifest
from pretrain.errors import UserError
from tests.pretrain.data.small import layout, real_texts, write_documents
from tests.tools.sharding.kills import killed_after
from tools.documents import is_validation
from tools.sharding.build import Building, build
from tools.sharding.pack import sole_builder
from tools.sharding.scan import blocks_of
from tools.sharding.seen import SeenTexts, hashes_of

# Each fills several members; some are there twice.
TEXTS = [text[:900] for text in real_texts(14)] + real_texts(2) + [real_texts(1)[0][:900]]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def building(manifest: Manifest, tmp_path: Path) -> Building:
    """Several inputs of different types, one of them with faults, in small units and small shards."""
    write_documents(tmp_path / "a.jsonl", TEXTS[:6])
    lines = write_documents(tmp_path / "b.jsonl", TEXTS[6:]).read_bytes()
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": 1}\n' + lines + b"\n"))
    assert manifest.tokenizer_file is not None
    return Building(
        inputs=[tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"],
        tokenizer=manifest.tokenizer_file,
        out=tmp_path / "whole",
        layout=layout(members_per_shard=3),
        validation_fraction=0.2,
        deduplicate=True,
        save_seconds=1e-9,
        unit_bytes=3000,
    )


def test_nothing_is_lost_without_a_count(building: Building) -> None:
    built = build(building)
    statistics = built.statistics
    assert statistics is not None
    assert statistics.dropped == {"empty": 1, "text is no string": 1}
    unique = list(dict.fromkeys(TEXTS))
    assert (statistics.records, statistics.documents, statistics.duplicates) == (19, len(unique), 17 - len(unique))
    assert statistics.duplicates > 0
    assert statistics.text_bytes == sum(len(text.encode()) for text in unique)
    assert statistics.document_tokens == sum(split.tokens + split.dropped_tokens + 1 for split in built.splits.values())
    assert statistics.bytes_per_token == round(statistics.text_bytes / statistics.document_tokens, 4)
    assert built.splits["validation"].documents == sum(is_validation(text, 0.2) for text in unique)
    assert (building.out / "small.dropped.txt").read_text().splitlines() == [
        f"{building.inputs[1]}:1: text is no string",
        f"{building.inputs[1]}:13: empty",
    ]


def test_units_and_processes_do_not_change_a_byte(building: Building, tmp_path: Path) -> None:
    build(building)
    expected = contents(building.out)
    for name, change in (("one", {"unit_bytes": 10**9}), ("many", {"unit_bytes": 1500, "workers": 2})):
        build(dataclasses.replace(building, out=tmp_path / name, **change))  # type: ignore[arg-type]
        assert contents(tmp_path / name) == expected


def test_a_build_killed_at_any_change_of_a_file_goes_on_to_the_same_bytes(building: Building, tmp_path: Path) -> None:
    build(building)
    expected = contents(building.out)
    changes = 0
    while True:
        out = tmp_path / f"killed-{changes}"
        killed = killed_after(changes, lambda out=out: build(dataclasses.replace(building, out=out)))
        if killed:
            build(dataclasses.replace(building, out=out, unit_bytes=2000, save_seconds=10))
        assert contents(out) == expected, f"killed after {changes} changes"
        if not killed:
            break
        changes += 2
    assert changes > 40


def test_a_build_killed_again_and_again_goes_on_to_the_same_bytes(building: Building, tmp_path: Path) -> None:
    build(building)
    out = tmp_path / "often"
    kills = 0
    # So little at a time that each start saves something before it is killed.
    while killed_after(35, lambda: build(dataclasses.replace(building, out=out, unit_bytes=700))):
        kills += 1
        assert kills < 20
    assert kills > 1
    assert contents(out) == contents(building.out)


def command(building: Building, workers: int) -> list[str]:
    return [
        *(sys.executable, "-m", "tools.shards", "build", "--input", *map(str, building.inputs)),
        *("--tokenizer", str(building.tokenizer), "--out", str(building.out), "--name", "small", "--deduplicate"),
        *("--sequence-length", "32", "--samples-per-member", "8", "--members-per-shard", "300"),
        *("--validation-fraction", "0.2", "--save-every", "0.01", "--workers", str(workers)),
    ]


def workers_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_a_killed_command_with_workers_leaves_no_process_and_goes_on(building: Building, tmp_path: Path) -> None:
    many = write_documents(tmp_path / "many.jsonl", [f"{number} {TEXTS[number % 14]}" for number in range(6000)])
    building = dataclasses.replace(building, inputs=[many], out=tmp_path / "killed")
    with subprocess.Popen(command(building, workers=2), stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not list(building.out.glob("small-train-000009.tar*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        children = workers_of(process.pid)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(children) >= 2
    assert not (building.out / "manifest.json").exists()
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    wide = dataclasses.replace(building, layout=layout(members_per_shard=300), unit_bytes=10**6)
    went_on = subprocess.run(command(building, workers=1), capture_output=True, text=True, check=True)
    assert went_on.stdout.startswith("going on after ")
    build(dataclasses.replace(wide, out=tmp_path / "whole"))
    assert contents(building.out) == contents(tmp_path / "whole")


def interrupt(building: Building) -> None:
    """Leave an unfinished build."""
    assert killed_after(20, lambda: build(building))
    assert (building.out / "small.build.json").exists()


def test_an_unfinished_build_is_not_gone_on_with_by_another(building: Building, tmp_path: Path) -> None:
    interrupt(building)
    for change, difference in (
        ({"validation_fraction": 0.3}, "validation fraction 0.2 instead of 0.3"),
        ({"deduplicate": False}, "deduplicate True instead of False"),
        ({"layout": layout(samples_per_member=4)}, "samples per member 8 instead of 4"),
        ({"inputs": building.inputs[:1]}, "other inputs"),
    ):
        with pytest.raises(UserError) as error:
            build(dataclasses.replace(building, **change))  # type: ignore[arg-type]
        assert str(error.value) == (
            f"{building.out} holds an unfinished build with {difference}: finish that one by its own command, "
            "choose another --out, or start anew by --force"
        )
    path = Path(building.inputs[0])
    write_documents(path, TEXTS[:5])
    with pytest.raises(UserError) as error:
        build(building)
    assert f"other inputs ({path} is new or was changed)" in str(error.value)
    build(dataclasses.replace(building, force=True))
    build(dataclasses.replace(building, out=tmp_path / "fresh"))
    assert contents(building.out) == contents(tmp_path / "fresh")


def test_a_partial_shard_that_is_gone_is_noticed(building: Building) -> None:
    interrupt(building)
    partial = next(building.out.glob("*.tar.tmp"))
    partial.unlink()
    with pytest.raises(UserError) as error:
        build(building)
    assert str(error.value) == f"{partial} is not as the interrupted build left it: start anew by --force"


def test_hashes_that_are_gone_are_noticed(building: Building) -> None:
    interrupt(building)
    hashes = building.out / "small.build.hashes"
    state = building.out / "small.build.json"
    assert json.loads(state.read_text())["hashes"] > 0
    hashes.unlink()
    with pytest.raises(UserError) as error:
        build(building)
    assert str(error.value) == f"{hashes} is not as the interrupted build left it: start anew by --force"


def test_another_tokenizer_is_not_overwritten(building: Building) -> None:
    building.out.mkdir()
    mine = building.out / "tokenizer.model"
    mine.write_bytes(b"took a day to train")
    with pytest.raises(UserError) as error:
        build(building)
    assert str(error.value) == (
        f"{mine} is another tokenizer than {building.tokenizer}: move it, or choose another --out"
    )
    assert contents(building.out) == {"tokenizer.model": b"took a day to train"}


def test_a_folder_of_inputs_may_be_the_output_folder_too(building: Building, tmp_path: Path) -> None:
    """The shards are tars and the list of the dropped a text, but no documents."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    for path in building.inputs:
        shutil.copy(path, folder)
    inside = dataclasses.replace(building, inputs=[folder], out=folder)
    first = build(inside)
    assert (folder / "small.dropped.txt").exists()
    assert (
        build(dataclasses.replace(inside, force=True)).fingerprint == first.fingerprint == build(building).fingerprint
    )


def test_strict_stops_at_the_first_fault_and_the_build_can_go_on_without_it(building: Building, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        build(dataclasses.replace(building, strict=True))
    assert str(error.value) == (f"{building.inputs[1]}:1: text is no string (--strict stops at the first bad input)")
    build(building)
    build(dataclasses.replace(building, out=tmp_path / "other"))
    assert contents(building.out) == contents(tmp_path / "other")


def test_two_builds_do_not_share_a_folder(building: Building) -> None:
    building.out.mkdir()
    with sole_builder(building.out), pytest.raises(UserError) as error:
        build(building)
    assert str(error.value) == (f"another build is at work in {building.out}: wait for it, or choose another --out")


def test_deduplication_keeps_the_first_of_equal_documents(building: Building, tmp_path: Path) -> None:
    once = write_documents(tmp_path / "once.jsonl", list(dict.fromkeys(TEXTS)))
    deduplicated = build(building)
    plain = build(dataclasses.replace(building, inputs=[once], out=tmp_path / "once", deduplicate=False))
    assert deduplicated.splits == plain.splits
    assert load_manifest(building.out).token_counts.tolist() == plain.token_counts.tolist()
    assert all(len(block) for block in blocks_of(deduplicated, "train"))


def test_seen_texts_are_a_set_that_can_be_cut_back(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    seen, known = SeenTexts(tmp_path / "hashes"), set[int]()
    saved, known_then = 0, set[int]()
    for step in range(60):
        numbers = generator.integers(0, 3000, size=int(generator.integers(1, 120))).tolist()
        mask = seen.add(hashes_of([str(number).encode() for number in numbers]))
        for number, new in zip(numbers, mask.tolist(), strict=True):
            assert new == (number not in known)
            known.add(number)
        assert seen.count == len(known)
        if step == 30:
            saved, known_then = seen.save(), set(known)
    seen.close()
    again = SeenTexts(tmp_path / "hashes", saved)
    assert (tmp_path / "hashes").stat().st_size == 16 * saved
    mask = again.add(hashes_of([str(number).encode() for number in range(3000)]))
    assert mask.tolist() == [number not in known_then for number in range(3000)]
    again.close()
