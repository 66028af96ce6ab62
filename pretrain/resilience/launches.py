"""What each start of a run leaves in ``RUN/launches/0001``, and when a job may no longer start its run by itself.

``launch.json`` says when, where, by which job, with which versions the run was started, and from which step;
``end.json`` how it ended, and is missing after a kill. Beside them lie ``config.yaml``, ``job.sh`` (the text given to
sbatch), ``changes.diff`` (the checkout's), ``environment.txt``, and after a hang ``stacks-<global_rank>.txt``.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.config import Config
from pretrain.config_file import dump_config
from pretrain.data.files import write_atomically
from pretrain.errors import SharedError, UserError
from pretrain.launch import Launch
from pretrain.provenance import git_revision, versions
from pretrain.resilience import records

_NUMBER = re.compile(r"\d{4,}")
MOST_IN_VAIN = 2


@dataclass(frozen=True)
class Job:
    """The batch job that a launch belongs to.

    Attributes:
        id: Slurm's.
        restart: how often Slurm or the job itself has started it again.
    """

    id: str
    restart: int


def current_job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process runs in, if any; Slurm does not set the count of restarts at the first start."""
    job = environment.get("SLURM_JOB_ID")
    return Job(job, int(environment.get("SLURM_RESTART_COUNT") or 0)) if job else None


def launches_folder(directory: Path) -> Path:
    """Folder of a run's launches."""
    return directory / "launches"


def require_progress(directory: Path, step: int, job: Job | None) -> None:
    """End a job that starts again and again without a new checkpoint.

    Processes of one start may call this before, while and after one of them records the start.

    Raises:
        SharedError: this job was started again, and its last two launches began at this same step.
    """
    if job is None:
        return
    before = [record for record in _records(directory, job.id) if record["restart"] < job.restart]
    in_vain = before[-MOST_IN_VAIN:]
    if len(in_vain) < MOST_IN_VAIN or any(record["start_step"] != step for record in in_vain):
        return
    folder = launches_folder(directory)
    ends = "; ".join(f"{record['number']:04d} {_how_it_ended(folder, record['number'])}" for record in in_vain)
    raise SharedError(
        f"{MOST_IN_VAIN} launches in a row ended without progress, at step {step}, so job {job.id} is not started "
        f"again: {ends}; see {folder}, mend the cause and submit the job anew"
    )


class LaunchRecord:
    """The folder of this start; made by global rank 0.

    Attributes:
        folder: the launch's.
    """

    def __init__(self, config: Config, launch: Launch, start_step: int) -> None:
        """Write down all that is known before the run starts.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._begin(config, launch, start_step)
        except OSError as error:
            folder = launches_folder(config.run.dir)
            raise UserError(f"run.dir={config.run.dir}: cannot write to {folder}: {error.strerror}") from None

    def _begin(self, config: Config, launch: Launch, start_step: int) -> None:
        self._began = time.time()
        job = current_job()
        self.number, self.folder = _new_folder(launches_folder(config.run.dir))
        self._content: dict[str, Any] = {
            "number": self.number,
            "started": self._began,
            "start_step": start_step,
            "job": job.id if job else None,
            "restart": job.restart if job else 0,
            **asdict(launch),
            "machine": records.machine(),
            "versions": versions(),
            "git_revision": git_revision(),
        }
        self._write("launch.json", self._content)
        texts = {
            "config.yaml": dump_config(config),
            "environment.txt": records.shown_environment(),
            "changes.diff": records.git_diff(),
            "job.sh": records.job_script(),
        }
        for name, text in texts.items():
            if text:
                (self.folder / name).write_text(text, encoding="utf-8")

    def add_hosts(self, hosts: Sequence[str]) -> None:
        """Host of every global rank, in their order."""
        self._content["hosts"] = list(hosts)
        self._write_if_possible("launch.json", self._content)

    def text(self) -> str:
        """The launch in Markdown."""
        content = self._content
        job = f"job {content['job']}, restart {content['restart']}" if content["job"] else "no batch job"
        hosts = ", ".join(sorted(set(content.get("hosts", []))))
        facts = [
            f"launch {self.number} from step {content['start_step']}",
            f"{content['world_size']} processes by {content['launcher']} on {hosts}; {job}",
            f"git {content['git_revision']}",
            ", ".join(f"{name} {number}" for name, number in content["versions"].items()),
        ]
        return "  \n".join(facts)

    def end(self, step: int, reason: str, times: Mapping[str, float | None]) -> None:
        """The launch ends in order, with a durable checkpoint of ``step``; ``times`` are seconds since the epoch."""
        ended = {"step": step, "reason": reason, "started": self._began, "ended": time.time(), **times}
        self._write_if_possible("end.json", ended)

    def _write_if_possible(self, name: str, content: Mapping[str, Any]) -> None:
        """The run goes on, and ends in order, without it."""
        try:
            self._write(name, content)
        except OSError as error:
            print(f"warning: {self.folder / name} cannot be written: {error.strerror}", flush=True)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.folder / name, (json.dumps(content, indent=1) + "\n").encode())


def _new_folder(launches: Path) -> tuple[int, Path]:
    launches.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in launches.iterdir() if _NUMBER.fullmatch(path.name)), default=0)
    while True:
        number += 1
        folder = launches / f"{number:04d}"
        with contextlib.suppress(FileExistsError):  # another start was faster; one of them will not get the run's lock
            folder.mkdir()
            return number, folder


def _records(directory: Path, job: str) -> list[dict[str, Any]]:
    """The records of this job's launches, in their order."""
    found = []
    for path in launches_folder(directory).glob("*/launch.json"):
        record = json.loads(path.read_bytes())
        if record["job"] == job:
            found.append(record)
    return sorted(found, key=lambda record: int(record["number"]))


def _how_it_ended(folder: Path, number: int) -> str:
    launch = folder / f"{number:04d}"
    if (launch / "end.json").exists():
        return str(json.loads((launch / "end.json").read_bytes())["reason"])
    stacks = sorted(launch.glob("stacks-*.txt"))
    return f"hung ({', '.join(path.name for path in stacks)})" if stacks else "was killed or failed"
