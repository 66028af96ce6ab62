"""The command line as a user meets it: alone, under each launcher, and with mistakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY
from tests.pretrain import runs

pytestmark = pytest.mark.dist

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("SLURM_")
    }
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "pretrain", "train", "configs/demo.yaml", *runs.SMALL, *overrides]


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_alone(manifest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [f"data.manifest={manifest}", f"run.dir={folder}", "train.steps=8"]
    first = run(command(*settings))
    assert (first.returncode, first.stderr) == (0, "")
    assert "step 8/8  loss " in first.stdout
    assert sorted(runs.curve(folder, "train/loss")) == list(range(1, 9))
    for tag in (
        *("train/loss", "train/grad_norm", "train/lr", "throughput/tokens_per_second"),
        *("geometry/angle_attention/layer_01", "geometry/angle_mlp/layer_02", "geometry/resultant_length/layer_02"),
    ):
        assert runs.curve(folder, tag)[8] > 0, tag
    angle = runs.curve(folder, "geometry/angle_mlp/layer_01")
    assert sorted(angle) == [3, 4, 6, 8]  # log steps and checkpoints
    again = run(command(*settings))
    assert (again.returncode, again.stderr) == (0, "")
    assert "has all of train.steps=8; raise train.steps to go on" in again.stdout


def test_under_srun_as_under_torchrun(manifest: Path, tmp_path: Path) -> None:
    settings = [f"data.manifest={manifest}", "train.steps=6", "parallel.tp=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run([*torchrun, *command(*settings, f"run.dir={tmp_path / 'torchrun'}")[1:]])
    assert done.returncode == 0, done.stdout + done.stderr
    tasks = [
        subprocess.Popen(
            command(*settings, f"run.dir={tmp_path / 'srun'}"),
            cwd=REPOSITORY,
            env=clean_environment(
                SLURM_JOB_ID=str(os.getpid()),
                SLURM_STEP_ID="0",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_STEP_NODELIST="localhost",
                SLURM_PROCID=str(task),
                SLURM_LOCALID=str(task),
            ),
            start_new_session=True,
        )
        for task in range(2)
    ]
    runs.finish(tasks, tmp_path / "none")
    assert runs.curve(tmp_path / "srun", "train/loss") == runs.curve(tmp_path / "torchrun", "train/loss")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.stps=5"], "error: configs/demo.yaml: train.stps is not a setting; did you mean train.steps?"),
        (["parallel.tp=2"], "error: 1 process(es) cannot be divided by parallel.tp=2 x parallel.pp=1;"),
        (["data.manifest=nowhere.json"], "error: manifest nowhere.json does not exist"),
    ],
)
def test_a_mistake_gets_one_line(overrides: list[str], line: str) -> None:
    done = run(command(*overrides))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_several_processes_tell_a_mistake_once(manifest: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = [f"data.manifest={manifest}", f"run.dir={tmp_path / 'run'}", "model.sequence_length=64"]
    processes = runs.start(settings, 2, log)
    assert [process.wait(120) for process in processes] == [2, 2]
    assert log.read_text().startswith("error: model.sequence_length=64 is longer than the shards' 32")
    assert log.read_text().count("\n") == 1


def test_a_run_that_diverges_stops_and_keeps_its_checkpoints(manifest: Path, tmp_path: Path) -> None:
    """An absurd initial scale overflows fp32: nothing broken is saved, and the run says what to change."""
    folder = tmp_path / "run"
    done = run(
        command(
            f"data.manifest={manifest}", f"run.dir={folder}", "model.init_std=1e30", "model.residual.scheme=pre_norm"
        )
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "was not finite in every step" in done.stderr
    assert not list(folder.glob("checkpoints/*"))
