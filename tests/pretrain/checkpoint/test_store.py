import json
import math
import multiprocessing
import os
import resource
import zlib
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint import store
from pretrain.checkpoint.files import DamageError, FileFacts, new_file
from pretrain.errors import UserError
from tests.pretrain.checkpoint.small import facts

_SHARE = {"fingerprint": "f", "order": "", "samples": 8, "weight": 1.0, "max_epochs": None, "first": 0}
_STAGE = {"start": 0, "shares": [_SHARE]}
_ROLLBACK = {"at": 9, "to": 6, "first": 100, "count": 20}
_SIGNALS = {"loss": [2.0, 3], "grad_norm": [1.0]}
_SPIKES = {
    "rollbacks": [_ROLLBACK],
    "detector": {"values": _SIGNALS, "scores": _SIGNALS},
    "layers": [{"step": 4, "values": {"gradient": [0.1]}}],
}


def published(folder: Path, step: int) -> Path:
    partial = store.new_partial(folder, step)
    with new_file(partial / "tensors") as file:
        file.write(b"1234")
    return store.publish(partial, step, facts(step), {"tensors": file.facts})


def test_published_checkpoints_only(tmp_path: Path) -> None:
    assert store.newest(tmp_path / "nothing") is None
    assert store.newest(tmp_path / ("too long" * 99)) is None
    for step in (9, 100, 20):
        published(tmp_path, step)
    store.new_partial(tmp_path, 300)
    (tmp_path / "step-00000400.damaged").mkdir()
    newest = store.newest(tmp_path)
    assert newest == tmp_path / "step-00000100"
    assert [store.step_of(path) for path in store.checkpoints(tmp_path)] == [100, 20, 9]
    files = {"tensors": {"bytes": 4, "crc32": zlib.crc32(b"1234")}}
    assert store.read_record(newest) == facts(100) | {"format": store.FORMAT, "files": files}
    assert store.recorded_files(newest) == {"tensors": FileFacts(4, zlib.crc32(b"1234"))}


def test_a_file_that_did_not_arrive_is_not_published(tmp_path: Path) -> None:
    partial = store.new_partial(tmp_path, 1)
    (partial / "tensors").write_bytes(b"123")
    with pytest.raises(OSError, match="tensors has 3 bytes instead of 4"):
        store.publish(partial, 1, facts(1), {"tensors": FileFacts(4, 0)})
    assert store.newest(tmp_path) is None


def test_a_damaged_one_is_kept_under_a_name_of_its_own(tmp_path: Path) -> None:
    assert store.set_aside(published(tmp_path, 1)).name == "step-00000001.damaged"
    assert store.set_aside(published(tmp_path, 1)).name == "step-00000001.damaged-2"
    assert store.newest(tmp_path) is None


def test_others_may_read_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert published(tmp_path, 1).stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "run.json").write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "run.json").write_text("[]"), "run.json is no record"),
        (lambda folder: (folder / "run.json").write_text("{}"), "run.json tells no format"),
        (lambda folder: (folder / "run.json").write_text("[" * 100_000), "recursion depth"),
        (lambda folder: _rewrite(folder, config=None, sealed=False), "run.json is not as it was written"),
        (lambda folder: (folder / "run.json").unlink(), "No such file"),
        (lambda folder: (folder / "tensors").unlink(), "No such file"),
        (lambda folder: (folder / "tensors").write_text("123"), "tensors has 3 bytes instead of 4"),
        (lambda folder: _rewrite(folder, adam_step=None), "run.json: adam_step: field required"),
        (lambda folder: _rewrite(folder, files=5), "run.json: files: input should be an object"),
        (lambda folder: _rewrite(folder, files={"x": {"bytes": "1", "crc32": 1}}), "run.json: files.x.bytes: input"),
        (lambda folder: _rewrite(folder, files={"../x": {"bytes": 1, "crc32": 1}}), "../x lies outside the checkpoint"),
        (lambda folder: _rewrite(folder, state={"step": "x"}), "run.json: state.step: input should be a valid integer"),
        (lambda folder: _rewrite(folder, state=facts(7)["state"]), "it was saved at step 7"),
        (lambda folder: _rewrite(folder, state=facts(1)["state"] | {"more": 1}), "state.more: extra inputs are not"),
        (lambda folder: _rewrite(folder, state=facts(1, data={"stages": 5})["state"]), "state.data.stages: input"),
        (lambda folder: _rewrite(folder, state=facts(1, callbacks={"x": 5})["state"]), "state.callbacks.x: input"),
        (lambda folder: _rewrite(folder, state=facts(1, callbacks={"validation": {}})["state"]), "validation.step"),
        (lambda folder: _rewrite(folder, state=facts(1, data={})["state"]), "state.data.stages: field required"),
        (lambda folder: _rewrite_data(folder, stages=[_STAGE | {"start": 5}]), "the stages are not in order"),
        (lambda folder: _rewrite_data(folder, stages=[_STAGE | {"shares": []}]), "shares: list should have at least 1"),
        (lambda folder: _rewrite_data(folder, stages=[_STAGE | {"shares": [_SHARE | {"weight": math.nan}]}]), "weight"),
        (lambda folder: _rewrite_data(folder, skipped=[[5, 0]]), "skipped.0.1: input should be greater than 0"),
        (lambda folder: _rewrite_data(folder, skipped=[[5, 10**30]]), "skipped.0.1: input should be less than"),
        (lambda folder: _rewrite_data(folder, skipped=[[5, 5], [9, 1]]), "the windows are not in order"),
        (
            lambda folder: _rewrite(folder, state=facts(1, train_seconds=math.inf)["state"]),
            "train_seconds: input should",
        ),
        (
            lambda folder: _rewrite(folder, state=facts(1, callbacks={"spikes": None})["state"]),
            "callbacks.spikes: input",
        ),
        (lambda folder: _rewrite_spikes(folder, rollbacks=[{"at": 1}]), "spikes.rollbacks.0.to: field required"),
        (
            lambda folder: _rewrite_spikes(folder, rollbacks=[_ROLLBACK | {"at": "9"}]),
            "rollbacks.0.at: input should be a",
        ),
        (
            lambda folder: _rewrite_spikes(folder, rollbacks=[_ROLLBACK | {"count": 0}]),
            "rollbacks.0.count: input should",
        ),
        (lambda folder: _rewrite_spikes(folder, detector={}), "spikes.detector.values: field required"),
        (
            lambda folder: _rewrite_spikes(folder, layers=[{"step": 1, "values": {"gradient": ["x"]}}]),
            "gradient.0: input",
        ),
        (lambda folder: _rewrite(folder, datasets=None), "run.json: datasets: field required"),
        (lambda folder: _rewrite(folder, tokenizer_sha256=7), "run.json: tokenizer_sha256: input"),
        (lambda folder: _rewrite(folder, vocab_size=1e300), "run.json: vocab_size: input"),
        (lambda folder: _rewrite(folder, vocab_size=-5), "run.json: vocab_size: input should be greater than 0"),
        (lambda folder: _replace_by_pipe(folder / "tensors"), "tensors is no file"),
        (lambda folder: _replace_by_pipe(folder / "run.json"), "run.json is no file"),
        (lambda folder: _replace(folder / "tensors").symlink_to("/dev/zero"), "tensors is no file"),
        (lambda folder: _replace(folder / "run.json").symlink_to("/dev/zero"), "run.json is no file"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    checkpoint = published(tmp_path, 1)
    damage(checkpoint)
    with pytest.raises(DamageError, match=f"is damaged: .*{message}"):
        store.read_record(checkpoint)


def _replace(path: Path) -> Path:
    path.unlink()
    return path


def _replace_by_pipe(path: Path) -> None:
    os.mkfifo(_replace(path))


def test_another_format_is_not_damage(tmp_path: Path) -> None:
    checkpoint = published(tmp_path, 1)
    _rewrite(checkpoint, format=1)
    with pytest.raises(UserError, match=f"step-00000001 has format 1, but this version reads {store.FORMAT}"):
        store.read_record(checkpoint)


def _rewrite(folder: Path, sealed: bool = True, **changes: Any) -> None:
    """As a forger would, with the right seal; None removes a key."""
    record = json.loads((folder / "run.json").read_text()) | changes
    record = {key: value for key, value in record.items() if value is not None}
    if sealed:
        del record["crc32"]
        record["crc32"] = zlib.crc32(json.dumps(record, sort_keys=True).encode())
    (folder / "run.json").write_text(json.dumps(record))


def _rewrite_data(folder: Path, **changes: Any) -> None:
    data = {"stages": [_STAGE], "skipped": [[5, 5], [10, 1]], "bad_samples": 0}
    _rewrite(folder, state=facts(1, data=data | changes)["state"])


def _rewrite_spikes(folder: Path, **changes: Any) -> None:
    _rewrite(folder, state=facts(1, callbacks={"spikes": _SPIKES | changes})["state"])


def test_what_a_run_writes_is_no_damage(tmp_path: Path) -> None:
    checkpoint = published(tmp_path, 1)
    _rewrite_data(checkpoint)
    assert store.read_record(checkpoint)["state"]["data"]["stages"] == [_STAGE]
    _rewrite_spikes(checkpoint)
    assert store.read_record(checkpoint)["state"]["callbacks"]["spikes"] == _SPIKES


def test_partial_folders_are_never_used_twice_and_go_at_the_next_start(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert store.new_partial(directory, 5) != store.new_partial(directory, 5)
    with store.locked_run(tmp_path):
        assert not list(directory.iterdir())


def _try_to_lock(folder: Path, answers: "multiprocessing.Queue[bool]") -> None:
    with store.locked_run(folder) as locked:
        answers.put(locked)


def _another_process_gets_the_lock(folder: Path) -> bool:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[bool] = context.Queue()
    process = context.Process(target=_try_to_lock, args=(folder, answers))
    process.start()
    answer = answers.get(timeout=300)
    process.join()
    return answer


def test_one_run_per_folder(tmp_path: Path) -> None:
    with store.locked_run(tmp_path) as locked:
        assert locked
        assert not _another_process_gets_the_lock(tmp_path)
    assert _another_process_gets_the_lock(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    store.require_writable(tmp_path / "run")
    assert not list((tmp_path / "run/checkpoints").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        store.require_writable(tmp_path / "file" / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/checkpoints").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        store.require_writable(tmp_path / "other")


def test_a_disk_that_takes_no_more_is_told_before_the_start(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write there: File too large"):
            store.require_writable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "checkpoints").iterdir())
