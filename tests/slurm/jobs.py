"""Jobs of the scripts in slurm/ on the test cluster: a model small enough for this machine, and what they leave."""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch import REPOSITORY
from tests.pretrain import runs
from tests.slurm.cluster import Cluster

SCRIPT = "slurm/geonorm_125m.sh"
STEADY = ["optimizer.lr=0.002", "optimizer.min_lr=0.002", "checkpoint.every=0", "validation.every=0"]
"""The losses of the first steps are then the same whatever the length of the run."""
ENDLESS = [*STEADY, "train.steps=1000000"]
SETTINGS = [*runs.SMALL, "model.vocab_size=null", "train.seed=1234", "logging.every=1", "optimizer.weight_decay=0.1"]


@dataclass
class Job:
    """One submitted job and its run."""

    cluster: Cluster
    number: int
    run: Path
    output: Path

    def text(self) -> str:
        """What it has written so far."""
        return self.output.read_text() if self.output.exists() else ""

    def steps(self) -> int:
        """Lines of training so far, over all launches."""
        return self.text().count("  loss ")

    def wait_for_steps(self, more: int, seconds: float = 120) -> None:
        """Until it has logged so many steps from now on, in whatever launch."""
        before = self.steps()
        self._wait(lambda: self.steps() >= before + more, seconds, f"{more} steps")

    def wait_for_text(self, text: str, times: int = 1, seconds: float = 120) -> None:
        """Until this stands in the output so many times."""
        self._wait(lambda: self.text().count(text) >= times, seconds, repr(text))

    def wish(self, name: str) -> None:
        """``touch RUN/NAME``."""
        (self.run / name).touch()

    def end(self, number: int) -> dict[str, Any]:
        """The ``end.json`` of a launch."""
        return dict(json.loads((self.run / "launches" / f"{number:04d}" / "end.json").read_text()))

    def launch(self, number: int) -> dict[str, Any]:
        """The ``launch.json`` of a launch."""
        return dict(json.loads((self.run / "launches" / f"{number:04d}" / "launch.json").read_text()))

    def restarts(self) -> int:
        """How often Slurm has started it again."""
        return int(self.cluster.facts(self.number)["Restarts"])

    def _wait(self, condition: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                facts = self.cluster.facts(self.number)
                raise AssertionError(f"job {self.number} ({facts['JobState']}): no {what}\n{self.text()[-6000:]}")
            time.sleep(0.1)


@dataclass
class Submitter:
    """Submits jobs with runs in a folder of their own."""

    cluster: Cluster
    manifest: Path
    folder: Path
    python: str = sys.executable

    def submit(
        self, *settings: str, nodes: int = 2, tasks: int = 1, options: tuple[str, ...] = (), **variables: str
    ) -> Job:
        """``sbatch OPTIONS slurm/geonorm_125m.sh SETTINGS`` with ranks of one CPU each and no GPU."""
        variables = {"MANIFEST": str(self.manifest), "PYTHON": self.python, "PREFLIGHT": "0"} | variables
        run = Path(tempfile.mkdtemp(dir=self.folder, prefix="runs-")) / "geonorm_125m"
        number = self.cluster.submit(
            SCRIPT,
            *SETTINGS,
            *settings,
            options=[
                *(f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--gpus-per-node=0", "--cpus-per-task=1"),
                *("--mem=1000", "--time=30", "--signal=B:USR1@60", f"--output={self.folder}/%j.out"),
                *options,
            ],
            RUNS=str(run.parent),
            GLOO_SOCKET_IFNAME="eth1",
            DS_ACCELERATOR="cpu",
            **variables,
        )
        return Job(self.cluster, number, run, self.folder / f"{number}.out")


def uninterrupted(manifest: Path, folder: Path, steps: int, *more: str) -> Path:
    """The run of ``STEADY`` in the same layout, for so many steps, with nothing in between."""
    run, log = folder / "uninterrupted", folder / "uninterrupted.log"
    settings = [*SETTINGS, *STEADY, f"data.manifest={manifest}", f"run.dir={run}", f"train.steps={steps}", *more]
    runs.finish(runs.start(settings, 2, log, "configs/geonorm_125m.yaml"), log, timeout=300)
    return run


def read_jobs_leftovers() -> list[str]:
    """Files that launchers keep in the project while their jobs run."""
    return sorted(path.name for pattern in (".verdict-*", ".job-*") for path in REPOSITORY.glob(pattern))
