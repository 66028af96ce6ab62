"""A real Slurm with several nodes on this machine: a controller, and a slurmd for each node in namespaces of its own.

A node has its own host name, processes, /etc/hosts and two network interfaces: Slurm talks over eth0, the ranks over
eth1, so that their link can be cut while Slurm still reaches the node. Killing a node's first process is a power cut.
Needs root, and Debian's packages slurm-wlm, munge and iproute2, which it installs when they are missing.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.launch import free_port

NODES = ("node1", "node2")
CPUS = 4
MEMORY_MB = 8000
BIG_NODES = 16
"""Nodes that exist on paper only, large enough for every script: sbatch --test-only asks for no more."""
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")
PACKAGES = ("slurm-wlm", "munge", "iproute2", "util-linux")
TIMEOUTS = "SlurmdTimeout=10 KillWait=5 SlurmctldTimeout=30 InactiveLimit=0 MinJobAge=3600"
CREDENTIAL_SECONDS = 5
"""A requeued job waits for so long; Slurm's default is 120."""


class Cluster:
    """A Slurm of :data:`NODES`; jobs are submitted from the repository."""

    def __init__(self, folder: Path) -> None:
        """Start it, and wait until all nodes are idle."""
        assert os.geteuid() == 0, "tests marked slurm start a Slurm of their own, which needs root"
        install()
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._tag = f"{os.getpid() % 10000:04d}"
        self._subnets = _free_subnets()
        self._controller_port, self._node_port = free_port(), free_port()
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("log", "spool", "state"):
            (folder / name).mkdir(parents=True)
        try:
            self._lay_cables()
            self._write_configuration()
            self._start_controller()
            for node in NODES:
                self.start_node(node)
            self.wait_until(self._all_idle, 60, "the nodes do not come up")
        except BaseException:
            self.close()
            raise

    # --- jobs

    def submit(self, script: str, *arguments: str, options: Sequence[str] = (), **variables: str) -> int:
        """``sbatch OPTIONS script ARGUMENTS``; returns the job's number."""
        done = self.run("sbatch", "--parsable", *options, script, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.strip().partition(";")[0])

    def facts(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job)).stdout
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)  # type: ignore[misc]

    def wait_for_state(self, job: int, *states: str, seconds: float = 180) -> str:
        """Until the job is in one of ``states``; fails when it ends in another one."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        self.wait_until(lambda: self.facts(job)["JobState"] in {*states, *ended}, seconds, f"job {job}: no {states}")
        state = self.facts(job)["JobState"]
        assert state in states, f"job {job} is {state}"
        return state

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm's."""
        return subprocess.run(
            command, env=self.environment | variables, capture_output=True, text=True, check=False, timeout=60
        )

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float, complaint: str) -> None:
        """Fails with ``complaint`` after so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, complaint
            time.sleep(0.1)

    # --- nodes

    def start_node(self, node: str) -> None:
        """Switch a node on."""
        hosts = self.folder / "hosts"
        script = (
            f"mount --bind {hosts} /etc/hosts; hostname {node}; "
            f"slurmd -D -N {node} -f {self.folder}/slurm.conf & wait"
        )  # this shell is the node's first process, and buries its dead
        with (self.folder / "log" / f"{node}.out").open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                [
                    *("nsenter", f"--net=/run/netns/{self._namespace(node)}"),
                    *("unshare", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"),
                    *("bash", "-c", script),
                ],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_node(self, node: str) -> None:
        """Pull its plug."""
        self._nodes[node].kill()
        self._nodes[node].wait()

    def cut_link(self, node: str, up: bool = False) -> None:
        """Take down, or up again, the interface over which the node's ranks talk: nobody is told, packets are lost."""
        _run("ip", "link", "set", self._cable(node, 1), "up" if up else "down")

    def mount_on(self, node: str, source: Path, target: Path) -> None:
        """Have ``target`` be another folder on this node."""
        first = _children(self._nodes[node].pid)[0]
        _run("nsenter", f"--target={first}", "--mount", "mount", "--bind", str(source), str(target))

    def unmount_on(self, node: str, target: Path) -> None:
        """Undo :meth:`mount_on`."""
        _run("nsenter", f"--target={_children(self._nodes[node].pid)[0]}", "--mount", "umount", str(target))

    def resume(self, node: str) -> None:
        """Start the node again and wait until Slurm uses it."""
        self.start_node(node)
        self.wait_until(lambda: self._node_states()[node] in ("idle", "mixed", "allocated"), 60, f"{node} stays away")

    # --- the end

    def close(self) -> None:
        """End all jobs and take everything down."""
        if (self.folder / "slurmctld.pid").exists():
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
        for process in [*self._nodes.values(), *self._daemons]:
            process.kill()
            process.wait()
        for node in NODES:
            for number in range(2):
                _try("ip", "link", "del", self._cable(node, number))
            _try("ip", "netns", "del", self._namespace(node))
        for number in range(2):
            _try("ip", "link", "del", self._bridge(number))

    # --- how it is made

    def _namespace(self, node: str) -> str:
        return f"t{self._tag}{node}"

    def _bridge(self, number: int) -> str:
        return f"t{self._tag}br{number}"

    def _cable(self, node: str, number: int) -> str:
        return f"t{self._tag}{node[-1]}v{number}"

    def address(self, node: str, number: int = 0) -> str:
        """Of the node's interface eth0 or eth1."""
        return f"{self._subnets[number]}.{10 + NODES.index(node)}"

    def _lay_cables(self) -> None:
        for number in range(2):
            _run("ip", "link", "add", self._bridge(number), "type", "bridge")
            _run("ip", "address", "add", f"{self._subnets[number]}.1/24", "dev", self._bridge(number))
            _run("ip", "link", "set", self._bridge(number), "up")
        for node in NODES:
            inside = ("ip", "-n", self._namespace(node))
            _run("ip", "netns", "add", self._namespace(node))
            _run(*inside, "link", "set", "lo", "up")
            for number in range(2):
                cable, end = self._cable(node, number), f"eth{number}"
                _run("ip", "link", "add", cable, "type", "veth", "peer", "name", end, "netns", self._namespace(node))
                _run("ip", "link", "set", cable, "master", self._bridge(number), "up")
                _run(*inside, "address", "add", f"{self.address(node, number)}/24", "dev", end)
                _run(*inside, "link", "set", end, "up")

    def _write_configuration(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{self.address(node)} {node}" for node in NODES)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        text = f"""
            ClusterName=test SlurmctldHost={socket.gethostname().partition(".")[0]}({self._subnets[0]}.1)
            SlurmctldPort={self._controller_port} SlurmdPort={self._node_port} SlurmUser=root SlurmdUser=root
            AuthType=auth/munge CredType=cred/munge
            AuthInfo=socket={self.folder}/munge.socket,cred_expire={CREDENTIAL_SECONDS}
            StateSaveLocation={self.folder}/state SlurmdSpoolDir={self.folder}/spool/%n
            SlurmctldPidFile={self.folder}/slurmctld.pid SlurmdPidFile={self.folder}/slurmd.%n.pid
            SlurmctldLogFile={self.folder}/log/slurmctld.log SlurmdLogFile={self.folder}/log/slurmd.%n.log
            ProctrackType=proctrack/linuxproc TaskPlugin=task/none JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/none SwitchType=switch/none MpiDefault=none
            SelectType=select/cons_tres SelectTypeParameters=CR_Core_Memory DefMemPerCPU=100
            SchedulerType=sched/backfill PriorityType=priority/basic
            SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
            SlurmdParameters=config_overrides PropagateResourceLimits=NONE ReturnToService=2 JobRequeue=1
            {TIMEOUTS} GresTypes=gpu MailProg=/bin/true
            ResumeProgram=/bin/true SuspendProgram=/bin/true SuspendTime=-1
        """
        rows = [row for row in text.split() if row]
        node = f"Boards=1 SocketsPerBoard=1 ThreadsPerCore=1 Port={self._node_port}"
        rows += [
            f"NodeName={name} NodeHostname={name} NodeAddr={self.address(name)} CPUs={CPUS} CoresPerSocket={CPUS} "
            f"RealMemory={MEMORY_MB} State=UNKNOWN {node}"
            for name in NODES
        ]
        rows += [
            # Nodes of a cloud count as there until they are needed.
            f"NodeName=big[1-{BIG_NODES}] CPUs=64 CoresPerSocket=64 RealMemory=1000000 Gres=gpu:8 State=CLOUD {node}",
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES DefaultTime=10 MaxTime=INFINITE State=UP",
            f"PartitionName=big Nodes=big[1-{BIG_NODES}] MaxTime=INFINITE State=UP",
        ]
        (self.folder / "slurm.conf").write_text("\n".join(rows) + "\n")
        (self.folder / "gres.conf").write_text(f"NodeName=big[1-{BIG_NODES}] Name=gpu Count=8\n")

    def _start_controller(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        munge = [f"--{name}={self.folder}/munge.{name}" for name in ("socket",)]
        munge += [f"--key-file={key}", f"--pid-file={self.folder}/munge.pid", f"--seed-file={self.folder}/munge.seed"]
        log = (self.folder / "log" / "daemons.out").open("ab")
        with log:
            for command in (
                ["munged", "--foreground", "--force", *munge, f"--log-file={self.folder}/log/munged.log"],
                ["slurmctld", "-D", "-f", f"{self.folder}/slurm.conf"],
            ):
                self._daemons.append(
                    subprocess.Popen(
                        command,
                        env=self.environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
                if command[0] == "munged":
                    socket_path = self.folder / "munge.socket"
                    self.wait_until(socket_path.exists, 20, "munged does not come up")

    def _node_states(self) -> dict[str, str]:
        listed = self.run("sinfo", "--noheader", "--Node", "--format=%n %T", "--partition=main").stdout
        return dict(line.split() for line in listed.splitlines())

    def _all_idle(self) -> bool:
        states = self._node_states()
        return bool(states) and all(state == "idle" for state in states.values())


def install() -> None:
    """Debian's packages, if a program is missing."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def _free_subnets() -> tuple[str, str]:
    """Two networks of 198.18.0.0/15, which RFC 2544 sets aside for tests, that no other test uses."""
    taken = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout
    free = [f"198.18.{number}" for number in range(1, 250) if f" 198.18.{number}." not in taken]
    first = os.getpid() % (len(free) - 1)
    return free[first], free[first + 1]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _try(*command: str) -> None:
    """For what may not have been made."""
    subprocess.run(command, capture_output=True, check=False)
