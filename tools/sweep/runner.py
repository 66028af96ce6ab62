"""Run what is left of a grid: real trainers, each a process of its own, several at once."""

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint import store
from pretrain.data.files import write_atomically
from pretrain.data.manifest import Manifest
from pretrain.launch import LAUNCHER_VARIABLES
from pretrain.provenance import versions
from pretrain.rampup import samples_of
from tools.sweep import curves
from tools.sweep.data import samples_identity, tokenizer_of
from tools.sweep.grid import Grid, Run, Settings
from tools.sweep.machine import code_revision, cores, describe
from tools.sweep.plan import RUNNABLE, Planned, all_settings, plan
from tools.sweep.results import Result, read_results, record

POLL_SECONDS = 0.2
OTHERS_POLL_SECONDS = 2.0
GRACE_SECONDS = 20.0
_SPEC_NAME = "spec.json"


@dataclass
class Job:
    """A trainer at work; ``lock`` is the descriptor that keeps the run for us."""

    planned: Planned
    spec: dict[str, Any]
    process: subprocess.Popen[bytes]
    lock: int


class Sweep:
    """Works through the runs that ``selected`` lets through, at most ``jobs`` at once.

    A run belongs to whoever holds its lock. The trainer inherits it, so one that outlives a killed sweep keeps its run,
    and the next sweep waits for it and takes its result.
    """

    def __init__(
        self, grid: Grid, data: Manifest, jobs: int, selected: Callable[[Run], bool], report: Callable[[], None]
    ) -> None:
        self._grid = grid
        self._data = data
        self._threads = max(1, cores() // (jobs * grid.file.processes))
        self._most = jobs
        self._selected = selected
        self._report = report
        self._active: list[Job] = []
        self._tried: set[str] = set()

    def work(self) -> list[Planned]:
        """Run until nothing is left that could be run; the state of all selected runs then.

        An interrupt ends the trainers first.
        """
        try:
            while True:
                held_elsewhere = self._start_what_fits()
                if not self._active and not held_elsewhere:
                    return self._planned()
                self._wait_for_one()
        finally:
            self._stop_all()

    def _planned(self) -> list[Planned]:
        planned = plan(self._grid, read_results(self._grid.results_folder), self._data)
        return [each for each in planned if self._selected(each.run)]

    def _start_what_fits(self) -> bool:
        """Start runs until ``jobs`` are at work; whether another process holds some that would be next."""
        held_elsewhere = False
        active = {job.planned.run.id for job in self._active}
        for planned in self._planned():
            folder = self._grid.folder(planned.run)
            if planned.counts:
                self._clear_checkpoints(planned.run)
            if planned.state not in RUNNABLE or planned.run.id in self._tried | active:
                continue
            if len(self._active) == self._most:
                break
            lock = _try_lock(folder)
            if lock is None:
                held_elsewhere = True
                continue
            if self._recorded_meanwhile(planned):
                os.close(lock)
                continue
            self._active.append(self._start(planned, lock))
        return held_elsewhere

    def _recorded_meanwhile(self, planned: Planned) -> bool:
        """Another sweep may have finished the run between our look at the results and our lock."""
        return read_results(self._grid.results_folder).get(planned.run.id) != planned.result

    def _start(self, planned: Planned, lock: int) -> Job:
        grid, run = self._grid, planned.run
        folder = grid.folder(run)
        spec = self._prepare_folder(planned)
        self._tried.add(run.id)
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                trainer(grid, run, planned.taken),
                env=_alone() | {"OMP_NUM_THREADS": str(self._threads)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt at the terminal reaches the sweep alone, which then ends the trainer in order.
                start_new_session=True,
                pass_fds=(lock,),
            )
        print(f"{_now()} {run.id}: started{_taken_text(planned)}", flush=True)
        return Job(planned, spec, process, lock)

    def _prepare_folder(self, planned: Planned) -> dict[str, Any]:
        """Keep what an interrupted start of this very run saved, and nothing else; what is written down of the run."""
        folder, run_dir = self._grid.folder(planned.run), self._grid.run_dir(planned.run)
        identity = {
            "settings": all_settings(self._grid, planned.run, planned.taken),
            "data": samples_identity(self._data),
        }
        spec_file = folder / _SPEC_NAME
        old = json.loads(spec_file.read_bytes()) if spec_file.exists() else {}
        same = all(old.get(key) == value for key, value in identity.items())
        if same and store.newest(store.checkpoint_folder(run_dir)):
            return old
        spec_file.unlink(missing_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        (folder / "log").unlink(missing_ok=True)
        spec = identity | {
            "started": time.time(),
            "machine": describe(self._threads),
            "versions": versions(),
            "git_revision": code_revision(),
        }
        write_atomically(spec_file, json.dumps(spec).encode())
        return spec

    def _wait_for_one(self) -> None:
        """Until a trainer ends; without one of our own, for as long as to look again what others did."""
        deadline = time.monotonic() + OTHERS_POLL_SECONDS
        while True:
            ended = [job for job in self._active if job.process.poll() is not None]
            for job in ended:
                self._active.remove(job)
                self._take_result(job)
            if ended or (len(self._active) < self._most and time.monotonic() > deadline):
                return
            time.sleep(POLL_SECONDS)

    def _take_result(self, job: Job) -> None:
        """Record what a trainer left, show it, and give the run back."""
        result = self._result(job)
        record(self._grid.results_folder, result)
        if result.status != "failed":
            self._clear_checkpoints(job.planned.run)
        os.close(job.lock)
        loss = "" if result.final_loss is None else f", validation loss {result.final_loss:.4f}"
        reason = f" ({result.reason})" if result.reason else ""
        print(f"{_now()} {result.id}: {result.status}{loss}, {result.seconds:.0f} s{reason}", flush=True)
        self._report()

    def _result(self, job: Job) -> Result:
        grid, run, spec = self._grid, job.planned.run, job.spec
        run_dir = grid.run_dir(run)
        config = grid.config(run, job.planned.taken)
        found = curves.read_curves(run_dir)
        entropy = self._data.split("validation").unigram_entropy
        status, reason = curves.judge(
            found,
            exit_status=job.process.returncode,
            last_line=_last_line(grid.folder(run) / "log"),
            steps=config.train.steps,
            unigram_entropy=entropy,
            margin=grid.file.diverged_above_unigram,
        )
        steps = max(found.loss, default=0)
        return Result(
            id=run.id,
            stage=run.stage,
            variant=run.variant,
            status=status,
            reason=reason,
            settings=spec["settings"],
            steps=steps,
            tokens=samples_of(steps, config.train) * config.model.sequence_length,
            validation=[(step, curves.finite(loss)) for step, loss in sorted(found.validation.items())],
            train=curves.thinned(found.loss),
            grad_norm_max=found.grad_norm_max(),
            steps_not_finite=len(found.steps_not_finite()),
            seconds=curves.training_seconds(run_dir, spec["started"], found.last_point),
            machine=spec["machine"],
            versions=spec["versions"],
            git_revision=spec["git_revision"],
            data=spec["data"],
            unigram_entropy=entropy,
            tokenizer=tokenizer_of(self._data),
            bits_per_byte=curves.finite(found.bits_per_byte.get(config.train.steps, math.nan)),
        )

    def _clear_checkpoints(self, run: Run) -> None:
        if not self._grid.file.keep_checkpoints:
            shutil.rmtree(store.checkpoint_folder(self._grid.run_dir(run)), ignore_errors=True)

    def _stop_all(self) -> None:
        """End the trainers that are still at work; their runs stay unfinished."""
        for job in self._active:
            _signal(job.process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for job in self._active:
            try:
                job.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(job.process, signal.SIGKILL)
                job.process.wait()
            os.close(job.lock)
        self._active.clear()


def trainer(grid: Grid, run: Run, taken: Settings) -> list[str]:
    """The command that trains a run, under torchrun where it is one of several processes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(grid.file.processes), "-m"]
    module = ["pretrain", "train", str(grid.base), *grid.overrides(run, taken)]
    return [sys.executable, "-m", *(launcher if grid.file.processes > 1 else []), *module]


def _alone() -> dict[str, str]:
    """This process's environment without its launcher's place for it, which several trainers would take at once."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}


def is_held(folder: Path) -> bool:
    """Whether some process works on the run of ``folder``."""
    if not folder.is_dir():
        return False
    lock = _try_lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is None


def _try_lock(folder: Path) -> int | None:
    """The descriptor of the run's lock, or None while another process holds it; the kernel frees it with the last."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"


def _taken_text(planned: Planned) -> str:
    return "".join(f", {name}={value}" for name, value in planned.taken.items())


def _now() -> str:
    return time.strftime("%H:%M:%S")
