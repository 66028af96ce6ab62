"""Every script: shellcheck finds nothing, and Slurm accepts it as it stands."""

import shlex
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


@pytest.mark.parametrize("script", SUBMITTED, ids=lambda path: path.name)
def test_submitted_from_elsewhere(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", script],
        env={"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {tmp_path}/slurm/launcher.sh does not exist; submit from the project's folder, or set PROJECT\n"
    )


def decided(status: int, verdict: str, state: str, folder: Path, *told: str) -> tuple[int, str]:
    """Status and last words of a job whose step ended so."""
    file = folder / "verdict"
    file.write_text(verdict)
    script = f"""
        scontrol() {{ [ "$1" != show ] || echo "JobId=1 JobState={state} Reason=None"; }}
        sinfo() {{ :; }}
        sleep() {{ :; }}
        status={status}; decide {" ".join(told)}
    """
    done = in_launcher(script, PRETRAIN_VERDICT=str(file), PRETRAIN_JOB_SCRIPT=str(folder / "job"), SLURM_JOB_ID="1")
    assert not file.exists(), done.stderr
    return done.returncode, done.stdout.partition("test: ")[2].strip()


def test_what_follows_the_end_of_a_step(tmp_path: Path) -> None:
    assert decided(0, "ended: in order", "RUNNING", tmp_path, "told") == (0, "ended well")
    assert decided(0, "", "RUNNING", tmp_path) == (0, "ended well")
    # Slurm may end all ranks at the time limit, and srun calls that a success.
    assert decided(0, "", "TIMEOUT", tmp_path, "told") == (
        1,
        "ended by Slurm, before the ranks could save: the job is TIMEOUT",
    )
    assert decided(0, "requeue: SIGUSR1", "RUNNING", tmp_path, "told") == (1, "requeued: SIGUSR1")
    assert decided(143, "failed: a defect", "RUNNING", tmp_path, "told") == (
        143,
        "failed with status 143; first: a defect",
    )
    assert decided(143, "requeue: SIGTERM", "CANCELLED", tmp_path, "told") == (
        143,
        "not requeued, since the job is CANCELLED: SIGTERM",
    )


ENVIRONMENT = "--container-env=PYTHONPATH,OMP_NUM_THREADS,PYTHONUNBUFFERED,MASTER_ADDR"


def in_launcher(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines of bash where the launcher's functions are."""
    return subprocess.run(
        ["bash", "-euc", f". slurm/launcher.sh\n{script}"],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "PROJECT": "/shared/project", "SLURM_JOB_NAME": "test", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def container_call(container: str, **variables: str) -> list[str]:
    """The words that the launcher would start in its tasks, with srun's own first."""
    script = 'choose_software; printf \'%s\\n\' "${container[@]}" -- "${python[@]}"'
    done = in_launcher(script, CONTAINER=container, **variables)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else [done.stderr]


def test_containers_as_text() -> None:
    """NOT RUN: there is neither pyxis nor apptainer; that the arguments are theirs is from their manuals."""
    image = "/images/pretrain.sqsh"
    assert container_call(f"pyxis:{image}", RUNS="/scratch/runs") == [
        f"--container-image={image}",
        "--container-mounts=/shared/project:/shared/project,/scratch/runs:/scratch/runs",
        "--container-workdir=/shared/project",
        ENVIRONMENT,
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
    shards = {"RUNS": "/scratch/runs", "MANIFEST": "/shards/web/manifest.json"}
    assert "/shared/project,/scratch/runs,/shards/web" in container_call("apptainer:/images/pretrain.sif", **shards)
    remote = {"RUNS": "/scratch/runs", "MANIFEST": "s3://bucket/web/manifest.json"}
    assert "/shared/project,/scratch/runs" in container_call("apptainer:/images/pretrain.sif", **remote)
    assert "use none, pyxis:IMAGE or apptainer:IMAGE" in container_call("docker:x")[0]
    assert "/shared/project/.venv/bin/python does not exist" in container_call("none")[0]


def test_the_project_may_be_named_from_where_it_lies() -> None:
    script = f"cd '{REPOSITORY.parent}'; check_allocation() {{ echo \"$PROJECT\"; exit; }}; prepare"
    done = in_launcher(script, PROJECT=REPOSITORY.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{REPOSITORY}\n", "")


def test_what_a_container_sees(tmp_path: Path) -> None:
    """Folders by the names that the run uses, which need not be absolute, nor without symbolic links."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "shared").symlink_to("disk")
    (tmp_path / "my project").mkdir()

    def seen(**variables: str) -> tuple[int, str]:
        script = f"cd '{tmp_path}/my project'; PROJECT=$PWD; choose_software; check_mounts; echo \"$mounted\""
        done = in_launcher(script, CONTAINER="apptainer:x.sif", **variables)
        return done.returncode, (done.stdout or done.stderr.partition(" error: ")[2]).replace(str(tmp_path), "")

    shared = f"{tmp_path}/shared"
    assert seen(RUNS=f"{shared}/runs", MANIFEST=f"{shared}/manifest.json") == (
        0,
        "/my project,/shared/runs,/shared\n",
    )
    assert (tmp_path / "disk" / "runs").is_dir()
    assert seen(RUNS="runs") == (0, "/my project,/my project/runs\n")
    assert seen(RUNS="/elsewhere", MOUNTS=f"{shared}:/elsewhere:ro") == (0, "/shared:/elsewhere:ro\n")
    assert seen(MANIFEST=f"{shared}/web/manifest.json") == (
        2,
        "the container is to see /shared/web, which does not exist; see PROJECT, MANIFEST or MOUNTS\n",
    )
    assert seen(RUNS="/proc/sys/runs") == (2, "RUNS=/proc/sys/runs cannot be made\n")


def step_call(container: str) -> str:
    """The whole command of a job on 2 nodes of 8 GPUs, from srun on, as a line of shell."""
    script = """
        srun() { printf '%q ' srun "$@"; }
        choose_software; tasks=16; start_step "${python[@]}" -m pretrain train configs/geonorm_1p3b.yaml; wait
    """
    variables = {"RUNS": "/scratch/runs", "MANIFEST": "/shards/manifest.json", "SLURM_NTASKS_PER_NODE": "8"}
    done = in_launcher(script, CONTAINER=container, **variables)
    return " ".join(shlex.split(done.stdout)) if done.returncode == 0 else done.stderr


def test_the_whole_command_of_two_nodes() -> None:
    """NOT RUN, as above."""
    begin = "srun --ntasks=16 --ntasks-per-node=8 --kill-on-bad-exit=1 --label"
    task = """bash -c trap "" USR1; exec "$@" task"""
    train = "python -m pretrain train configs/geonorm_1p3b.yaml"
    assert step_call("pyxis:/images/pretrain.sqsh") == (
        f"{begin} --container-image=/images/pretrain.sqsh"
        " --container-mounts=/shared/project:/shared/project,/scratch/runs:/scratch/runs,/shards:/shards"
        f" --container-workdir=/shared/project {ENVIRONMENT} {task} {train}"
    )
    assert step_call("apptainer:/images/pretrain.sif") == (
        f"{begin} {task} apptainer exec --nv --bind /shared/project,/scratch/runs,/shards --pwd /shared/project"
        f" /images/pretrain.sif {train}"
    )


def rendezvous(nodes: int, **addresses: str) -> subprocess.CompletedProcess[str]:
    """MASTER_ADDR of a job on the node ``head`` and others, where names have these addresses as seen from there."""
    known = " ".join(f"{name}) echo '{address} STREAM';;" for name, address in addresses.items())
    script = f"""
        getent() {{ case $2 in {known} esac; }}
        scontrol() {{ [ $2 = node ] && echo 'NodeAddr=ip_head NodeHostName=head' || printf 'head\\nother\\n'; }}
        find_rendezvous
        echo "$MASTER_ADDR"
    """
    return in_launcher(script, SLURM_JOB_NODELIST="head,other", SLURM_JOB_NUM_NODES=str(nodes))


def test_ranks_meet_at_an_address_that_others_can_reach() -> None:
    assert rendezvous(2, head="10.0.0.5").stdout == "10.0.0.5\n"
    # As Debian's installer has it: a host's own name is its loopback. Slurm knows better.
    assert rendezvous(2, head="127.0.1.1", ip_head="10.0.0.6").stdout == "10.0.0.6\n"
    failed = rendezvous(2, head="127.0.1.1")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "the first node, head, has no address that the others can reach" in failed.stderr
    alone = rendezvous(1, head="127.0.1.1").stdout
    assert "head has no address but its loopback, which is enough for one node" in alone
    assert alone.endswith("\n127.0.0.1\n")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "submit this script with sbatch"),
        ({"SLURM_NTASKS_PER_NODE": ""}, "give sbatch --ntasks-per-node"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "8 task(s) per node but 4 GPU(s)"),
    ],
)
def test_one_task_per_gpu(variables: dict[str, str], message: str) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "8"}
    assert in_launcher("check_allocation; echo $PRETRAIN_WORLD_SIZE", **job).stdout == "24\n"
    refused = in_launcher("check_allocation", **job | variables)
    assert refused.returncode == 2
    assert message in refused.stderr
