"""How this process was started: alone, by torchrun or by srun. Reads the environment, starts nothing."""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from pretrain.errors import UserError

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_STEP_NUM_TASKS", "PRETRAIN_WORLD_SIZE", "PRETRAIN_VERDICT"),
)
"""Without these a process is alone, whatever started its parent."""


@dataclass(frozen=True)
class Launch:
    """One process's place in the job.

    Attributes:
        launcher: ``alone``, ``torchrun`` or ``srun``.
        global_rank: 0 to world_size - 1.
        local_rank: index of this process on its node; picks the GPU.
        master_addr, master_port: where global rank 0 listens.
    """

    launcher: str
    global_rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that ``environment`` describes.

    torchrun's variables win over srun's, since torchrun may itself be started by srun. In a batch script Slurm sets
    SLURM_PROCID too; only a step of srun has SLURM_STEP_NUM_TASKS.

    Raises:
        UserError: when a launcher's variables are incomplete, not numbers, contradict one another, or name no host.
    """
    launch = _read(environment)
    if not launch.global_rank < launch.world_size:
        raise UserError(
            f"the {launch.launcher} environment gives process {launch.global_rank} of {launch.world_size}; "
            f"processes count from 0 to {launch.world_size - 1}"
        )
    asked = environment.get("PRETRAIN_WORLD_SIZE")
    if asked and int(asked) != launch.world_size:
        raise UserError(f"{asked} processes were asked for, but {launch.launcher} started {launch.world_size}")
    if not 0 < launch.master_port < 2**16:
        raise UserError(f"MASTER_PORT={launch.master_port} is not a port; use 1024 to 65535")
    if launch.world_size > 1:
        _require_host(launch.master_addr)
    return launch


def _read(environment: Mapping[str, str]) -> Launch:
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return Launch(
            launcher="torchrun",
            global_rank=_integer(environment, "RANK"),
            world_size=_integer(environment, "WORLD_SIZE"),
            local_rank=_integer(environment, "LOCAL_RANK"),
            master_addr=_text(environment, "MASTER_ADDR"),
            master_port=_integer(environment, "MASTER_PORT"),
        )
    if "SLURM_STEP_NUM_TASKS" in environment:
        return Launch(
            launcher="srun",
            global_rank=_integer(environment, "SLURM_PROCID"),
            world_size=_integer(environment, "SLURM_STEP_NUM_TASKS"),
            local_rank=_integer(environment, "SLURM_LOCALID"),
            master_addr=environment.get("MASTER_ADDR") or _first_slurm_host(environment),
            master_port=_slurm_port(environment),
        )
    return Launch("alone", 0, 1, 0, "127.0.0.1", free_port())


def _text(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise UserError(f"{name} is not set, though other launcher variables are; start with torchrun, srun or neither")
    return environment[name]


def _integer(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isdecimal():
        raise UserError(f"{name}={value!r} in the environment is not a number; it is set by torchrun or srun")
    return int(value)


def _require_host(name: str) -> None:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise UserError(f"MASTER_ADDR={name} is not a host that this one can find: {error.strerror}") from None


def _slurm_port(environment: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environment:
        return _integer(environment, "MASTER_PORT")
    # Two jobs on one node must not meet; a step of its own keeps restarts within a job apart.
    return 20000 + (_integer(environment, "SLURM_JOB_ID") * 16 + _integer(environment, "SLURM_STEP_ID") % 16) % 20000


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    nodes = _text(environment, "SLURM_STEP_NODELIST")
    if nodes.replace("-", "").replace(".", "").isalnum():
        return nodes  # one node: a plain name needs no expansion
    if shutil.which("scontrol") is None:
        raise UserError(f"cannot expand SLURM_STEP_NODELIST={nodes}: scontrol is not on the PATH; set MASTER_ADDR")
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    hosts = listed.stdout.split()
    if listed.returncode or not hosts:
        raise UserError(f"cannot expand SLURM_STEP_NODELIST={nodes}: scontrol failed; set MASTER_ADDR")
    return hosts[0]


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
