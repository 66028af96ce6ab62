"""Each kind of damage to a data set, and exactly what verify says of it; what other commands do about it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.manifest import Manifest, load_manifest
from pretrain.data.shard_index import load_index, write_index
from pretrain.errors import UserError
from tests.pretrain.data.test_damage import MEMBER_ROWS, MEMBERS, ROW_BYTES, SHARD, edit, flip, tar_of, zero
from tests.servers.http import http_server
from tools.shards import main
from tools.verify_shards import find_faults

NAME = f"small-train-{SHARD:06d}.tar"
OTHER = "small-train-000000.tar"
ALL_BAD = [
    f"member {member}: {MEMBER_ROWS} of {MEMBER_ROWS} samples, the first its sample 0, have another crc32 than the "
    "index"
    for member in range(MEMBERS)
]


def header_of(tar: Path, member: int) -> int:
    """Byte of a member's header in the tar; that of its .npy file lies between it and the samples."""
    return int(load_index(tar.with_suffix(".idx")).offsets[member]) - 128 - 512


def swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    assert one != two
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated in its first header": (
        lambda tar: edit(tar, lambda content: content.__delitem__(slice(100, None))),
        [f"{NAME}: 100 bytes, the manifest says 10240"],
    ),
    "truncated in a member": (
        lambda tar: edit(tar, lambda content: content.__delitem__(slice(-4000, None))),
        [f"{NAME}: 6240 bytes, the manifest says 10240"],
    ),
    "flipped byte in a header": (
        lambda tar: edit(tar, flip(header_of(tar, 2) + 100)),
        [f"{NAME}: its sha256 is not the manifest's, though the samples are sound (a tar header, padding or the man"],
    ),
    "zeroed member": (
        lambda tar: edit(tar, zero(header_of(tar, 4), header_of(tar, 4) + 640 + MEMBER_ROWS * ROW_BYTES)),
        [f"{NAME}: {ALL_BAD[4]}"],
    ),
    "flipped byte in a sample": (
        lambda tar: edit(tar, flip(header_of(tar, 2) + 640 + 3 * ROW_BYTES + 40)),
        [f"{NAME}: member 2: 1 of 8 samples, the first its sample 3, have another crc32 than the index"],
    ),
    "missing tar": (lambda tar: tar.unlink(), [f"{NAME}: missing"]),
    "missing index": (
        lambda tar: tar.with_suffix(".idx").unlink(),
        [f"{NAME}: shard index {{folder}}/{NAME[:-4]}.idx does not exist"],
    ),
    "index of another tar": (
        lambda tar: tar.with_suffix(".idx").write_bytes(tar.with_name(OTHER).with_suffix(".idx").read_bytes()),
        [f"{NAME}: shard index {{folder}}/{NAME[:-4]}.idx is not the one that the manifest describes: build the sh"],
    ),
    "altered index": (
        lambda tar: edit(tar.with_suffix(".idx"), flip(-20)),
        [f"{NAME}: shard index {{folder}}/{NAME[:-4]}.idx is not the one that the manifest describes: build the sh"],
    ),
    "swapped tars": (
        lambda tar: swap(tar, tar.with_name(OTHER)),
        [f"{name}: {fault}" for name in (OTHER, NAME) for fault in ALL_BAD],
    ),
    "swapped tars and indices": (
        lambda tar: [
            swap(*(part.with_suffix(end) for part in (tar, tar.with_name(OTHER)))) for end in (".tar", ".idx")
        ],
        [
            f"{name}: shard index {{folder}}/{name[:-4]}.idx is not the one that the manifest describes: build the sh"
            for name in (OTHER, NAME)
        ],
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_tells_the_damage_and_nothing_else(own_copy: Path, kind: str) -> None:
    damage, expected = DAMAGE[kind]
    damage(tar_of(own_copy))
    faults = list(find_faults(load_manifest(own_copy)))
    assert len(faults) == len(expected)
    for fault, start in zip(faults, expected, strict=True):
        assert fault.startswith(start.format(folder=own_copy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tar": OTHER}, f"its index says tar {OTHER}, the manifest {NAME}"),
        ({"eod_id": 2}, "its index says eod_id 2, the manifest 1"),
        ({}, "member 0 of its index is none of the tar's"),
    ],
)
def test_verify_finds_an_index_that_the_manifest_was_altered_to_fit(
    own_copy: Path, change: dict[str, object], message: str
) -> None:
    """Where the header is not changed, the first member begins a sample too late."""
    tar, path = tar_of(own_copy), own_copy / "manifest.json"
    index = load_index(tar.with_suffix(".idx"))
    offsets, rows, crc32 = (np.array(array) for array in (index.offsets, index.rows, index.crc32))
    samples = index.header.samples
    if not change:
        offsets[0] += ROW_BYTES
        rows[0] -= 1
        crc32, samples = crc32[1:], samples - 1
    header = dataclasses.replace(index.header, samples=samples, **change)  # type: ignore[arg-type]
    content = json.loads(path.read_text())
    train = content["splits"]["train"]
    train["shards"][SHARD].update(
        index_sha256=write_index(tar.with_suffix(".idx"), header, offsets, rows, crc32), samples=samples
    )
    train["samples"] -= index.header.samples - samples
    path.write_text(json.dumps(content))
    assert next(find_faults(load_manifest(own_copy))) == f"{NAME}: {message}"


@pytest.mark.parametrize("command", ["merge", "inspect"])
def test_commands_that_read_shards_tell_damage_in_one_line(
    own_copy: Path, manifest: Manifest, command: str, tmp_path: Path
) -> None:
    """Of the validation split, which both read."""
    tar = own_copy / "small-validation-000000.tar"
    out = ["--out", str(tmp_path / "merged")] if command == "merge" else ["--samples", "10000"]
    edit(tar, flip(header_of(tar, 1) + 640))
    with pytest.raises(UserError) as error:
        main([command, str(own_copy), *out])
    assert str(error.value) == (
        f"{tar} is damaged: 1 of 8 samples, the first its sample 0, have another crc32 than the index; "
        "python -m tools.shards verify finds all damage"
    )
    tar.unlink()
    with pytest.raises(UserError) as error:
        main([command, str(own_copy), *out])
    assert str(error.value) == (
        f"{tar} is missing, though {own_copy} lists it"
        if command == "merge"
        else f"{tar} cannot be read: No such file or directory"
    )


@pytest.mark.parametrize("command", ["merge", "inspect", "verify"])
def test_commands_tell_that_a_data_set_is_remote(own_copy: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(own_copy))  # of the cache
    out = ["--out", str(own_copy / "merged")] if command == "merge" else []
    with http_server(own_copy) as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(UserError) as error:
            main([command, f"{url}/manifest.json", *out])
    assert str(error.value) == f"{url} is remote; this needs a data set on a local disk: copy it"
