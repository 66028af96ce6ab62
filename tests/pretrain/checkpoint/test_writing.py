"""Checkpoints of a few tensors, written and read by one process: whole, or nothing."""

import json
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from pretrain.checkpoint import store, writing
from pretrain.checkpoint.contents import read_contents, read_tensors, shapes
from pretrain.checkpoint.files import find_damage
from pretrain.checkpoint.record import RECORD
from pretrain.checkpoint.saving import Background
from pretrain.checkpoint.writing import Job, Piece, write, write_pieces
from pretrain.errors import UserError
from tests.pretrain.checkpoint.small import job, saved, tensors

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("single_process")]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 7)
    expected = tensors(7)
    assert shapes(read_contents(checkpoint)) == {key: tensor.shape for key, tensor in expected.items()}
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    read_tensors(found, checkpoint)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    record = store.read_record(checkpoint)
    assert set(record["files"]) == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}
    assert find_damage(checkpoint, store.recorded_files(checkpoint)) is None
    assert record["state"]["step"] == record["adam_step"] == 7
    # A view's storage would be written whole: the file holds the tensors and a header for each part.
    assert (checkpoint / "__0_0.distcp").stat().st_size < sum(t.nbytes for t in expected.values()) + 3 * 2000


def test_megatron_core_reads_the_files(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 7)
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor)) for key, tensor in tensors(7).items()}
    loaded = dist_checkpointing.load(state, str(checkpoint))
    for key, tensor in tensors(7).items():
        assert torch.equal(loaded[key], tensor), key


@pytest.fixture
def background() -> tuple[Background, list[str | None]]:
    told: list[str | None] = []
    return Background(dist.new_group(backend="gloo"), lambda job, fault: told.append(fault)), told


def test_what_changes_beside_the_writing_is_not_written(
    tmp_path: Path, background: tuple[Background, list[str | None]]
) -> None:
    saves, told = background
    for step in (1, 2):  # the second save uses the same room
        changing = job(tmp_path, step, numel=1 << 20)
        saves.begin(changing)
        for piece in changing.pieces:
            piece.tensor.fill_(-1)
        with pytest.raises(AssertionError, match="two saves"):
            saves.begin(changing)
        assert saves.wait() is None
        assert saves.is_done
        expected = tensors(step, 1 << 20)
        found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        read_tensors(found, tmp_path / f"step-{step:08d}")
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert told == [None, None]
    assert saves.wait() is None


def test_the_name_appears_when_all_is_written_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of system calls: each file synced under the hidden name, then the folder, the rename, the parent."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        assert not list(tmp_path.glob("step-*")) or calls[-1] == tmp_path.name
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    checkpoint = saved(tmp_path, 1)
    hidden = calls.pop(-3)
    assert hidden.startswith(".partial-1-")
    assert calls[-2:] == ["rename", tmp_path.name]
    assert sorted(calls[:-2]) == sorted(path.name for path in checkpoint.iterdir())


def failed(job: Job) -> str:
    fault = write(job)
    assert fault is not None
    assert not list(job.directory.glob(".partial-*"))
    assert f"step-{job.step:08d}" not in {path.name for path in job.directory.iterdir()}
    return fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here; the limit on file sizes is tested instead")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_one_checkpoint_and_nothing_else(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(small_disk, 1)
    fault = failed(job(small_disk, 2, numel=1 << 20))
    assert fault.startswith(f"the checkpoint of step 2 could not be written to {small_disk}: it takes 8.4 MB, but 4.")
    # Another program takes the room while the checkpoint is written: the disk itself refuses.
    late = job(small_disk, 3, numel=1 << 18)
    monkeypatch.setattr(writing, "write_pieces", lambda path, pieces: _fill_then(small_disk, path, pieces))
    assert failed(late).endswith(f"could not be written to {small_disk}: No space left on device")
    monkeypatch.undo()
    assert store.checkpoints(small_disk) == [first]
    (small_disk / "other").unlink()
    assert write(late) is None


def _fill_then(disk: Path, path: Path, pieces: Sequence[Piece]) -> object:
    (disk / "other").write_bytes(b"x" * (3 << 20))
    return write_pieces(path, pieces)


def test_a_disk_that_refuses_in_the_midst_costs_one_checkpoint(tmp_path: Path) -> None:
    first = saved(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        fault = failed(job(tmp_path, 2, numel=1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert fault == f"the checkpoint of step 2 could not be written to {tmp_path}: File too large"
    assert store.checkpoints(tmp_path) == [first]
    assert write(job(tmp_path, 2, numel=1 << 20)) is None


def test_damage_of_every_file_is_named(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 7)
    for name in store.recorded_files(checkpoint):
        path = checkpoint / name
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        fault = find_damage(checkpoint, store.recorded_files(checkpoint))
        assert fault is not None
        assert fault.startswith(f"{checkpoint} is damaged: {name} has the crc32 ")
        store.read_record(checkpoint)  # which looks at sizes alone
        path.write_bytes(content)
    record = json.loads((checkpoint / RECORD).read_text())
    record["state"]["tokens"] = 8
    (checkpoint / RECORD).write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"is damaged: run\.json is not as it was written"):
        store.read_record(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_what_is_no_file_is_never_waited_for(tmp_path: Path, name: str) -> None:
    """Whoever forged the record need not have named it there."""
    checkpoint = saved(tmp_path, 7)
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    assert f"{name} cannot be read: {name} is no file" in str(
        find_damage(checkpoint, store.recorded_files(checkpoint)),
    )
    with pytest.raises(UserError, match=f"{name} is no file"):
        read_contents(checkpoint)
