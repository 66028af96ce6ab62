"""Real jobs over two nodes: that end, run out of time, are cancelled, lose a node or a link, or fail."""

import sys
from pathlib import Path

import pytest

from pretrain.resilience.launches import launches_folder
from tests.pretrain import runs
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ENDLESS, REPOSITORY, STEADY, Job, Submitter, read_jobs_leftovers, uninterrupted
from tests.tools.sweeps import content, write_grid
from tools.sweep.grid import load_grid
from tools.sweep.results import read_results

pytestmark = [pytest.mark.slurm, pytest.mark.dist]

WATCHFUL = ["watchdog.floor_seconds=8", "watchdog.factor=3"]


def require_same_losses(job: Job, manifest: Path, folder: Path, steps: int, *settings: str) -> None:
    """The run's first ``steps`` losses are those of a run that nothing happened to, bit for bit."""
    expected = runs.curve(uninterrupted(manifest, folder, steps, *settings), "train/loss")
    losses = runs.curve(job.run, "train/loss")
    assert len(expected) == steps
    assert {step: losses[step] for step in expected} == expected


def stop(job: Job) -> None:
    """End the run by its user's wish: the job has done what it should."""
    job.wish("stop")
    job.cluster.wait_for_state(job.number, "COMPLETED")
    assert not (job.run / "stop").exists()
    assert read_jobs_leftovers() == []


def test_two_nodes_to_the_end(jobs: Submitter, manifest: Path, tmp_path: Path) -> None:
    job = jobs.submit(*STEADY, "train.steps=12", PREFLIGHT="1", MY_TOKEN="abc123secret")
    jobs.cluster.wait_for_state(job.number, "COMPLETED")
    assert "preflight: 2 process(es) on 2 node(s), no GPU, all-reduce " in job.text()
    assert "\n0: step 12/12  saved to " in job.text()
    require_same_losses(job, manifest, tmp_path, 12)
    launch, folder = job.launch(1), launches_folder(job.run) / "0001"
    assert (launch["hosts"], launch["start_step"], launch["world_size"]) == (["node1", "node2"], 0, 2)
    assert launch["launcher"] == "srun"
    assert (launch["job"], launch["restart"]) == (str(job.number), 0)
    assert (folder / "job.sh").read_text() == (REPOSITORY / "slurm/geonorm_125m.sh").read_text()
    recorded = (folder / "environment.txt").read_text()
    assert f"SLURM_JOB_ID={job.number}\n" in recorded
    assert "MY_TOKEN" in recorded
    assert "abc123secret" not in recorded
    assert job.end(1)["reason"] == "finished"
    assert job.restarts() == 0


def test_a_run_out_of_time_goes_on_by_itself(jobs: Submitter, manifest: Path, tmp_path: Path) -> None:
    """Slurm's own signal before the time limit; then the same job, run folder and curves."""
    job = jobs.submit(*ENDLESS, "train.global_batch=32", options=("--time=2", "--signal=B:USR1@105"))
    job.wait_for_text("requeued: SIGUSR1", seconds=150)
    job.wait_for_text("resumed from", seconds=60)
    job.wait_for_steps(3)
    first = job.end(1)
    stop(job)
    assert job.restarts() >= 1
    assert first["reason"] == "SIGUSR1"
    assert job.launch(2)["start_step"] == first["step"]
    assert job.launch(2)["restart"] == 1
    print(
        f"signal to durable checkpoint {first['durable'] - first['signal']:.2f} s, "
        f"requeued to first step {job.end(2)['first_step'] - first['ended']:.1f} s"
    )
    require_same_losses(job, manifest, tmp_path, first["step"] + 3, "train.global_batch=32")


def test_a_dead_node_and_a_cancelled_job(jobs: Submitter, manifest: Path, tmp_path: Path) -> None:
    """Slurm requeues a job that lost a node; one that is cancelled saves itself and stays away."""
    job = jobs.submit(*ENDLESS, "checkpoint.every=5")
    job.wait_for_text("saved to")
    job.wait_for_steps(2)
    jobs.cluster.kill_node("node2")
    jobs.cluster.wait_for_state(job.number, "PENDING", seconds=60)
    jobs.cluster.resume("node2")
    job.wait_for_text("resumed from")
    job.wait_for_steps(3)
    assert job.restarts() == 1
    jobs.cluster.run("scancel", str(job.number))
    jobs.cluster.wait_for_state(job.number, "CANCELLED")
    job.wait_for_text("not requeued")
    ended = job.end(2)
    assert ended["reason"] == "SIGTERM"
    assert (job.run / "checkpoints" / f"step-{ended['step']:08d}").is_dir()
    require_same_losses(job, manifest, tmp_path, ended["step"])


def test_a_cut_link_is_a_hang_that_the_watchdog_ends(jobs: Submitter, cluster: Cluster) -> None:
    job = jobs.submit(*ENDLESS, *WATCHFUL)
    job.wait_for_steps(5)
    job.wish("save")
    job.wait_for_text("save: done")
    job.wait_for_steps(5)
    cluster.cut_link("node2")
    try:
        job.wait_for_text("requeued: global rank ", seconds=60)
    finally:
        cluster.cut_link("node2", up=True)
    for global_rank in (0, 1):
        stacks = (launches_folder(job.run) / f"0001/stacks-{global_rank}.txt").read_text()
        assert f"global rank {global_rank} hangs: nothing for " in stacks
        assert "in train" in stacks
    job.wait_for_text("resumed from")
    job.wait_for_steps(1)
    stop(job)
    assert job.restarts() == 1
    steps = runs.curve(job.run, "train/loss")
    assert list(steps) == list(range(1, len(steps) + 1))


def test_a_rank_that_raises_ends_the_job_at_once(jobs: Submitter, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{jobs.python}" -m tests.slurm.raising "$@"\n')
    python.chmod(0o755)
    job = jobs.submit(*ENDLESS, PYTHON=str(python))
    jobs.cluster.wait_for_state(job.number, "FAILED")
    lines = job.text().splitlines()
    errors = [line for line in lines if line.startswith(("0: Traceback", "1: Traceback", "1: RuntimeError"))]
    assert errors[:2] == ["1: Traceback (most recent call last):", "1: RuntimeError: a defect on purpose"]
    assert "failed with status" in lines[-1]
    assert "first: RuntimeError: a defect on purpose" in lines[-1]
    assert job.restarts() == 0


def test_two_jobs_on_one_node(jobs: Submitter) -> None:
    pair = [jobs.submit(*STEADY, "train.steps=8", nodes=1, tasks=2, options=("--nodelist=node1",)) for _ in range(2)]
    for job in pair:
        jobs.cluster.wait_for_state(job.number, "COMPLETED")
    first, second = (job.launch(1) for job in pair)
    assert first["hosts"] == second["hosts"] == ["node1", "node1"]
    assert first["master_port"] != second["master_port"]
    assert runs.curve(pair[0].run, "train/loss") == runs.curve(pair[1].run, "train/loss")


def test_preflight_names_the_node_whose_folder_is_not_shared(jobs: Submitter, cluster: Cluster, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    job = jobs.submit(*STEADY, "train.steps=4", PREFLIGHT="1", options=("--hold",))
    cluster.mount_on("node2", own, job.run.parent)
    try:
        cluster.run("scontrol", "release", str(job.number))
        cluster.wait_for_state(job.number, "FAILED")
    finally:
        cluster.unmount_on("node2", job.run.parent)
    assert f"error: preflight: node2: run.dir={job.run} is not the folder that the first node sees" in job.text()
    assert not launches_folder(job.run).exists()


def test_a_sweep_as_an_array(cluster: Cluster, tmp_path: Path) -> None:
    """Two tasks on two nodes: each takes its part of the grid, and together they take all of it."""
    stages = {"rates": {"vary": {"optimizer.lr": [0.001], "train.seed": [1, 2]}}}
    grid = write_grid(tmp_path, content() | {"stages": stages})
    job = cluster.submit(
        "slurm/sweep.sh",
        *("--jobs", "2"),
        options=[
            *("--array=0-1", "--gpus-per-node=0", "--cpus-per-task=3", "--mem=3000", "--time=30"),
            f"--output={tmp_path}/%a.out",
        ],
        GRID=str(grid),
        PYTHON=sys.executable,
        DS_ACCELERATOR="cpu",
    )
    cluster.wait_until(lambda: str(job) not in cluster.run("squeue", "--noheader", "--format=%F").stdout, 240, "no end")
    said = [(tmp_path / f"{index}.out").read_text() for index in range(2)]
    results = read_results(load_grid(grid).results_folder).values()
    assert {(result.variant, result.status) for result in results} == {
        ("geonorm", "finished"),
        ("pre_norm", "finished"),
    }, said
    assert [text.count(": finished") for text in said] == [2, 2], said
