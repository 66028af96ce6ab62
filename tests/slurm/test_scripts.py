"""Every script: shellcheck finds nothing, and Slurm accepts it as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY
from tests.slurm.cluster import Cluster

ALL = sorted((REPOSITORY / "slurm").glob("*.sh"))
SUBMITTED = [path for path in ALL if path.name != "launcher.sh"]


def test_there_is_a_script_for_every_large_configuration() -> None:
    names = {path.stem for path in (REPOSITORY / "configs").glob("geonorm_*.yaml")}
    assert names == {path.stem for path in SUBMITTED} - {"sweep"}


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-x", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("script", SUBMITTED, ids=lambda path: path.name)
def test_slurm_accepts_it(cluster: Cluster, script: Path) -> None:
    done = cluster.run("sbatch", "--test-only", "--partition=big", str(script))
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr
    refused = cluster.run("sbatch", "--test-only", "--partition=big", "--nodes=1000", str(script))
    assert refused.returncode != 0


def container_call(container: str, **variables: str) -> list[str]:
    """The words that the launcher would start in its tasks, with srun's own first."""
    script = """
        . slurm/launcher.sh
        PROJECT=/shared/project SLURM_JOB_NAME=test
        choose_software
        printf '%s\\n' "${container[@]}" -- "${python[@]}"
    """
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "CONTAINER": container, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else [done.stderr]


def test_containers_as_text() -> None:
    """NOT RUN: there is neither pyxis nor apptainer; that the arguments are theirs is from their manuals."""
    image = "/images/pretrain.sqsh"
    assert container_call(f"pyxis:{image}", RUNS="/scratch/runs") == [
        f"--container-image={image}",
        "--container-mounts=/shared/project:/shared/project,/scratch/runs:/scratch/runs",
        "--container-workdir=/shared/project",
        "--",
        "python",
    ]
    assert container_call("pyxis:registry#team/image:1", MOUNTS="/data:/data:ro,/home")[:2] == [
        "--container-image=registry#team/image:1",
        "--container-mounts=/data:/data:ro,/home:/home",
    ]
    assert container_call("apptainer:/images/pretrain.sif", PYTHON="/opt/venv/bin/python") == [
        *("--", "apptainer", "exec", "--nv", "--bind", "/shared/project", "--pwd", "/shared/project"),
        *("/images/pretrain.sif", "/opt/venv/bin/python"),
    ]
    assert "use none, pyxis:IMAGE or apptainer:IMAGE" in container_call("docker:x")[0]
    assert "/shared/project/.venv/bin/python does not exist" in container_call("none")[0]
