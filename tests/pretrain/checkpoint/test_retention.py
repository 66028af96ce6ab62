from pathlib import Path

import pytest

from pretrain.checkpoint import store
from pretrain.checkpoint.record import RECORD
from pretrain.checkpoint.retention import Saved, expendable, remove_expendable
from pretrain.config import CheckpointSettings
from tests.pretrain.checkpoint.small import saved

RUN = [Saved(100, 3.0), Saved(200, 2.0), Saved(300, 2.5), Saved(400, None), Saved(500, float("nan")), Saved(600, 2.7)]


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({}, []),
        ({"keep_last": 2}, [100, 200, 300, 400]),
        ({"keep_last": 1}, [100, 200, 300, 400, 500]),
        ({"keep_last": 9}, []),
        ({"keep_last": 1, "keep_every": 200}, [100, 300, 500]),
        ({"keep_last": 1, "keep_best": True}, [100, 300, 400, 500]),
        ({"keep_last": 2, "keep_every": 300, "keep_best": True}, [100, 400]),
    ],
)
def test_what_no_setting_keeps(settings: dict[str, object], gone: list[int]) -> None:
    assert expendable(RUN, CheckpointSettings(**settings)) == gone
    assert expendable(RUN[::-1], CheckpointSettings(**settings)) == gone


def test_the_only_one_stays() -> None:
    assert expendable([Saved(100, 3.0)], CheckpointSettings(keep_last=1, keep_best=True)) == []
    assert expendable([], CheckpointSettings(keep_last=1)) == []


@pytest.mark.dist
@pytest.mark.usefixtures("single_process")
def test_removed_from_disk_but_not_for_a_damaged_one(tmp_path: Path) -> None:
    """What is damaged or of another version does not count as one of the last, or the last sound one would go."""
    saved(tmp_path, 5)
    (tmp_path / "step-00000005" / RECORD).write_text('{"format": 1}')
    for step, loss in ((1, 2.0), (2, 3.0), (3, 3.5), (4, 4.0)):
        measured = 1 if step == 3 else step  # the third remembers one that was measured at the first
        callbacks = {"validation": {"step": measured, "loss": 1.0 if step == 3 else loss}}
        saved(tmp_path, step, callbacks=callbacks)
    (tmp_path / "step-00000004" / "__0_0.distcp").write_bytes(b"")
    remove_expendable(tmp_path, CheckpointSettings(keep_last=1, keep_best=True))
    assert [store.step_of(path) for path in store.checkpoints(tmp_path)] == [5, 4, 3, 1]
    remove_expendable(tmp_path, CheckpointSettings(keep_last=1))
    assert [store.step_of(path) for path in store.checkpoints(tmp_path)] == [5, 4, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (3, 4, 5)]


def test_a_removal_that_was_killed_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "checkpoints"
    (directory / "step-00000001").mkdir(parents=True)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.remove(directory / "step-00000001")
    assert store.newest(directory) is None
    with store.locked_run(tmp_path):
        assert not list(directory.iterdir())
