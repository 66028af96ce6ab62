import multiprocessing
from pathlib import Path

import pytest

from pretrain.checkpoint import store
from pretrain.errors import UserError


def test_published_checkpoints_only(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "nothing") is None
    for step in (9, 100, 20):
        store.publish(store.new_partial(tmp_path, step), step, {"step": step})
    store.new_partial(tmp_path, 300)
    (tmp_path / "step-00000400.old").mkdir()
    newest = store.newest(tmp_path)
    assert newest == tmp_path / "step-00000100"
    assert store.read_record(newest) == {"step": 100}


def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    checkpoint = store.publish(store.new_partial(tmp_path, 1), 1, {})
    (checkpoint / store.RECORD).write_text("{")
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        store.read_record(checkpoint)


def test_partial_folders_are_never_used_twice_and_go_at_the_next_start(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert store.new_partial(directory, 5) != store.new_partial(directory, 5)
    with store.locked_run(tmp_path):
        assert not list(directory.iterdir())


def _try_to_lock(folder: Path, answers: "multiprocessing.Queue[str]") -> None:
    try:
        with store.locked_run(folder):
            answers.put("locked")
    except UserError as error:
        answers.put(str(error))


def _ask_another_process(folder: Path) -> str:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[str] = context.Queue()
    process = context.Process(target=_try_to_lock, args=(folder, answers))
    process.start()
    answer = answers.get(timeout=60)
    process.join()
    return answer


def test_one_run_per_folder(tmp_path: Path) -> None:
    with store.locked_run(tmp_path):
        assert "is in use by another run" in _ask_another_process(tmp_path)
    assert _ask_another_process(tmp_path) == "locked"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"), store.locked_run(tmp_path / "file" / "run"):
        pass
