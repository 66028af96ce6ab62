import json
import subprocess
from pathlib import Path

import pytest

from pretrain.config_file import load_config
from pretrain.errors import SharedError, UserError
from pretrain.launch import Launch
from pretrain.provenance import git_revision
from pretrain.resilience.launches import Job, LaunchRecord, current_job, launches_folder, require_progress
from pretrain.resilience.records import git_diff, job_script, shown_environment
from pretrain.resilience.verdict import leave_end, leave_verdict
from tests.launch import REPOSITORY

ALONE = Launch("alone", 0, 1, 0, "127.0.0.1", 12345)


def launch(run: Path, step: int, job: str = "17", restart: int = 0) -> LaunchRecord:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", job)
        patch.setenv("SLURM_RESTART_COUNT", str(restart)) if restart else patch.delenv("SLURM_RESTART_COUNT", False)
        return LaunchRecord(load_config(REPOSITORY / "configs/demo.yaml", [f"run.dir={run}"]), ALONE, step)


def test_launches_are_numbered_and_hold_what_they_should(tmp_path: Path) -> None:
    first, second = launch(tmp_path, 0), launch(tmp_path, 10, restart=1)
    second.add_hosts(["a", "b"])
    second.end(20, "finished", {"first_step": 1.0, "signal": None})
    assert [first.folder.name, second.folder.name] == ["0001", "0002"]
    record = json.loads((second.folder / "launch.json").read_text())
    assert record["start_step"] == 10
    assert (record["job"], record["restart"], record["hosts"]) == ("17", 1, ["a", "b"])
    assert record["versions"]["torch"]
    assert load_config(second.folder / "config.yaml", []) == load_config(
        REPOSITORY / "configs/demo.yaml", [f"run.dir={tmp_path}"]
    )
    assert json.loads((second.folder / "end.json").read_text())["step"] == 20
    assert "launch 2 from step 10" in second.text()
    assert "job 17, restart 1" in second.text()


def test_a_record_that_cannot_be_written_is_told_at_the_start_and_warned_of_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = launch(tmp_path / "run", 0)
    for file in record.folder.iterdir():
        file.unlink()
    record.folder.rmdir()
    record.add_hosts(["a"])
    record.end(20, "finished", {})
    assert capsys.readouterr().out.count("cannot be written: No such file or directory") == 2
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "launches").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*launches: File exists"):
        launch(tmp_path / "taken", 0)


def test_two_launches_in_vain_are_enough(tmp_path: Path) -> None:
    launch(tmp_path, 0, job="3")
    launch(tmp_path, 40)
    require_progress(tmp_path, 40, Job("17", 1))
    (launch(tmp_path, 40, restart=1).folder / "stacks-3.txt").touch()
    with pytest.raises(SharedError) as caught:
        require_progress(tmp_path, 40, Job("17", 2))
    assert str(caught.value) == (
        "2 launches in a row ended without progress, at step 40, so job 17 is not started again: "
        f"0002 was killed or failed; 0003 hung (stacks-3.txt); see {launches_folder(tmp_path)}, mend the cause and "
        "submit the job anew"
    )
    require_progress(tmp_path, 41, Job("17", 2))
    require_progress(tmp_path, 40, Job("18", 0))  # submitted anew
    require_progress(tmp_path, 40, None)


def test_the_record_of_this_very_start_is_no_launch_in_vain(tmp_path: Path) -> None:
    """Other ranks may look after global rank 0 has made it."""
    launch(tmp_path, 40)
    launch(tmp_path, 40, restart=1)
    require_progress(tmp_path, 40, Job("17", 1))


def test_the_first_start_of_a_job_has_no_restart_count() -> None:
    assert current_job({}) is None
    assert current_job({"SLURM_JOB_ID": "5"}) == Job("5", 0)
    assert current_job({"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "2"}) == Job("5", 2)


def test_no_secret_is_recorded() -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s1",
        "WANDB_API_KEY": "s2",
        "MY_DATABASE": "postgres://u:s3@host/db",
        "SLURM_JWT_TOKEN": "s4",
        "PRETRAIN_PASSWORD": "s5",
        "HTTPS_PROXY": "http://u:s6@proxy",
        "SLURM_JWT": "s9",
    }
    exported = {"SLURM_EXPORT_ENV": "ALL,HF_TOKEN=s10,DATABASE=s11 s12,NCCL_DEBUG=INFO"}
    shown = shown_environment(
        secrets | exported | {"SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "PYTHON_X": "http://u:s7@h/?k=s8"}
    )
    assert "SLURM_JOB_ID=7\n" in shown
    assert "NCCL_DEBUG=INFO\n" in shown
    assert "PYTHON_X=http://***@h/?***\n" in shown
    assert "SLURM_EXPORT_ENV=ALL,HF_TOKEN=***,DATABASE=***,NCCL_DEBUG=INFO\n" in shown
    for number in range(1, 13):
        assert f"s{number}" not in shown, number
    assert all(name in shown for name in secrets)


def test_a_job_script_keeps_its_text_but_no_secret(tmp_path: Path) -> None:
    kept = tmp_path / "job.sh"
    kept.write_text(
        "#SBATCH --export=ALL,HF_TOKEN=s1\nexport WANDB_API_KEY='s2 s3' AWS_SECRET_ACCESS_KEY=\"s4\"\n"
        "curl https://u:s5@host/x\npython -m pretrain train a.yaml data.tokenizer=t.model MANIFEST=/a/b\n"
    )
    assert job_script({"SLURM_JOB_ID": "", "PRETRAIN_JOB_SCRIPT": str(kept)}) == (
        "#SBATCH --export=ALL,HF_TOKEN=***\nexport WANDB_API_KEY=*** AWS_SECRET_ACCESS_KEY=***\n"
        "curl https://***@host/x\npython -m pretrain train a.yaml data.tokenizer=t.model MANIFEST=/a/b\n"
    )


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_changes_are_recorded_with_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme of one's own is a new file: without it nobody could run this again."""
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "old.py").write_text("one = 1\nsame = 0\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "m")
    assert git_diff(tmp_path) == ""
    (tmp_path / "pretrain" / "old.py").write_text("two = 2\nsame = 0\n")
    (tmp_path / "pretrain" / "scheme.py").write_text("new = 3\n")
    (tmp_path / "pretrain" / "weights.bin").write_bytes(b"\0")
    (tmp_path / "notes.txt").write_text("mine\n")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as a container's user sees what is mounted
    diff = git_diff(tmp_path)
    assert "-one = 1\n+two = 2\n" in diff
    assert "+++ b/pretrain/scheme.py\n@@ -0,0 +1 @@\n+new = 3\n" in diff
    assert not [word for word in ("weights.bin", "notes.txt", "mine") if word in diff]
    assert git_diff(tmp_path / ".git" / "nowhere") == ""
    assert git_revision("pretrain"), "this checkout is another owner's now"


def test_the_first_verdict_counts(tmp_path: Path) -> None:
    file = tmp_path / "verdict"
    environment = {"PRETRAIN_VERDICT": str(file)}
    leave_verdict(requeue=False, reason="a\nb", environment=environment)
    leave_verdict(requeue=True, reason="c", environment=environment)
    assert file.read_text() == "failed: a b\n"
    leave_verdict(requeue=True, reason="c", environment={})
    file.unlink()
    leave_end(environment=environment)
    assert file.read_text() == "ended: in order\n"
