"""``python -m pretrain preflight CONFIG``, one process per GPU: are these nodes fit? Names those that are not.

All processes meet at global rank 0's store, tell what they found, see one another's files in the run's folder, and
measure an all-reduce. A node that does not come or does not answer is named by those that wait for it.
"""

import datetime
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pretrain.config import Config
from pretrain.errors import SharedError
from pretrain.launch import Launch
from pretrain.plan.disk import Disk, checkpoint_disk
from pretrain.provenance import versions
from pretrain.resilience.links import all_reduce_gigabytes, slow_links
from pretrain.resilience.node_facts import Facts, faults, free_bytes, own_skew
from pretrain.resilience.records import host

LIMIT_SECONDS = 55
MEET_SECONDS = 30
SEE_SECONDS = 10
"""A file that another node has just written may take a while to be seen."""


def run_preflight(config: Config, launch: Launch) -> None:
    """Check the nodes; global rank 0 prints what it found.

    Raises:
        SharedError: something is wrong; after a line for each fault.
    """
    started = time.monotonic()
    stage = _Stage(launch)
    store = _meet(launch, stage)
    facts = _look_around(config, launch)
    stage.name = "comparing clocks and the run's folder"
    facts = _compare_with_first(facts, config, launch, store)
    stage.name = "telling what was found"
    found = _gather(facts, launch, store)
    disk = checkpoint_disk(config, _parameters(config))
    wrong = faults(found, 2 * disk.each)
    speed, slow = 0.0, list[str]()
    if not wrong:
        stage.name = "the all-reduce over all processes"
        _start_group(launch, store)
        speed = all_reduce_gigabytes(launch.local_rank)
        stage.name = "the links from node to node"
        slow = slow_links([facts.host for facts in found], launch.local_rank)
        dist.destroy_process_group()
    _part(launch, store)
    stage.done()
    if launch.global_rank == 0:
        free = found[0].free[str(config.run.dir)]
        _report(found, speed, [*slow, *_too_many(disk, free)], wrong, time.monotonic() - started)
    if wrong and launch.global_rank:
        sys.exit(2)  # global rank 0 tells
    if wrong:
        raise SharedError(
            f"{len(wrong)} fault(s) above; leave these nodes out with sbatch --exclude=NODE, or mend them"
        )


class _Stage:
    """What this process is doing; ends it when that takes too long, for a node that fails may just be silent."""

    def __init__(self, launch: Launch) -> None:
        self.name = "meeting"
        self._global_rank = launch.global_rank
        self._timer = threading.Timer(LIMIT_SECONDS, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        print(
            f"error: preflight: {host()} (global rank {self._global_rank}) is not done after {LIMIT_SECONDS} s: "
            f"{self.name}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)


def _meet(launch: Launch, stage: _Stage) -> Store:
    """The store of all processes, once all have come.

    Raises:
        SharedError: some have not.
    """
    where = f"{launch.master_addr}:{launch.master_port}"
    stage.name = f"waiting for {where}"
    try:
        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=launch.global_rank == 0,
            timeout=datetime.timedelta(seconds=MEET_SECONDS),
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError):
        raise SharedError(f"preflight: {host()} cannot reach {where}, where global rank 0 should be") from None
    store.set(f"here/{launch.global_rank}", host())
    if launch.global_rank == 0:
        names = [f"here/{each}" for each in range(launch.world_size)]
        try:
            store.wait(names, datetime.timedelta(seconds=MEET_SECONDS))
        except dist.DistStoreError:
            absent = [each for each, name in enumerate(names) if not store.check([name])]
            raise SharedError(f"preflight: no word after {MEET_SECONDS} s from {_places(absent, launch)}") from None
    return store


def _places(global_ranks: Sequence[int], launch: Launch) -> str:
    """Global ranks with their nodes: srun fills one node after the other."""
    nodes = os.environ.get("PRETRAIN_NODES", "").split()
    each = launch.world_size // len(nodes) if nodes else 0
    of = {rank: nodes[rank // each] if each else "an unknown node" for rank in global_ranks}
    return ", ".join(
        f"{node} (global ranks {' '.join(str(rank) for rank in global_ranks if of[rank] == node)})"
        for node in dict.fromkeys(of.values())
    )


def _look_around(config: Config, launch: Launch) -> Facts:
    given = os.environ.get("SLURM_GPUS_ON_NODE")
    places = {str(config.run.dir), os.environ.get("TMPDIR", "/tmp")}
    kind, memory, free = "", 0, 0
    if torch.cuda.is_available():
        device = launch.local_rank % torch.cuda.device_count()
        free, memory = torch.cuda.mem_get_info(device)
        kind = torch.cuda.get_device_name(device)
    return Facts(
        host=host(),
        versions=versions() | {"CUDA": str(torch.version.cuda), "NCCL": _nccl()},
        gpus=torch.cuda.device_count(),
        gpus_given=int(given) if given else None,
        gpu=kind,
        gpu_bytes=memory,
        gpu_free=free,
        free={place: free_bytes(Path(place)) for place in sorted(places)},
    )


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _compare_with_first(facts: Facts, config: Config, launch: Launch, store: Store) -> Facts:
    """The same with this clock's skew, and whether this process and global rank 0 see one another's files."""
    folder = config.run.dir / f".preflight-{os.environ.get('SLURM_JOB_ID', os.getpid())}"
    if launch.global_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        (folder / "first").write_text(token)
        store.set("folder", f"{folder}")
        store.set("token", token)
        store.set("clock", repr(time.time()))
    store.wait(["clock"], datetime.timedelta(seconds=MEET_SECONDS))
    facts = replace(facts, skew_seconds=own_skew(float(store.get("clock"))) if launch.global_rank else 0.0)
    folder, token = Path(store.get("folder").decode()), store.get("token").decode()
    fault = _see(folder / "first", token)
    if not fault:
        (folder / f"seen-{launch.global_rank}").write_text(token)
    store.set(f"wrote/{launch.global_rank}", fault)
    if launch.global_rank == 0:
        for other in range(launch.world_size):
            if not store.get(f"wrote/{other}"):
                store.set(f"seen/{other}", _see(folder / f"seen-{other}", token))
            else:
                store.set(f"seen/{other}", "")
        shutil.rmtree(folder)
    return replace(facts, shared_fault=fault or store.get(f"seen/{launch.global_rank}").decode())


def _see(path: Path, content: str) -> str:
    """Empty once the file is there; else what is wrong."""
    deadline = time.monotonic() + SEE_SECONDS
    while True:
        try:
            if path.read_text() == content:
                return ""
            reason = "another content"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            return f"run.dir={path.parent.parent} is not the folder that the first node sees ({reason}); share it"
        time.sleep(0.1)


def _gather(facts: Facts, launch: Launch, store: Store) -> list[Facts]:
    store.set(f"facts/{launch.global_rank}", json.dumps(asdict(facts)))
    names = [f"facts/{each}" for each in range(launch.world_size)]
    store.wait(names, datetime.timedelta(seconds=LIMIT_SECONDS))
    return [Facts(**json.loads(store.get(name))) for name in names]


def _start_group(launch: Launch, store: Store) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("group", store),
        rank=launch.global_rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=LIMIT_SECONDS),
    )


def _parameters(config: Config) -> int:
    """About how many the model has."""
    model = config.model
    layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.ffn_hidden_size
    return model.num_layers * layer + 2 * (model.vocab_size or 0) * model.hidden_size


def _too_many(disk: Disk, free: int) -> list[str]:
    """One line if the run will keep more checkpoints than the disk has room for."""
    if disk.total <= free:
        return []
    return [
        f"the run keeps {disk.kept} checkpoints of about {disk.each / 1e9:,.1f} GB, {disk.total / 1e9:,.0f} GB, but "
        f"run.dir has {free / 1e9:,.0f} GB free; set checkpoint.keep_last, or make room"
    ]


def _part(launch: Launch, store: Store) -> None:
    """Global rank 0 keeps the store until the others need it no more."""
    if launch.global_rank:
        store.set(f"bye/{launch.global_rank}", "")
    else:
        store.wait([f"bye/{other}" for other in range(1, launch.world_size)], datetime.timedelta(seconds=MEET_SECONDS))


def _report(found: Sequence[Facts], speed: float, doubts: Sequence[str], wrong: Sequence[str], seconds: float) -> None:
    for line in wrong:
        print(f"error: preflight: {line}", file=sys.stderr, flush=True)
    for line in doubts:
        print(f"warning: preflight: {line}", flush=True)
    nodes = dict.fromkeys(facts.host for facts in found)
    skew = max(abs(facts.skew_seconds) for facts in found)
    free = min(room for facts in found for room in facts.free.values())
    print(
        f"preflight: {len(found)} process(es) on {len(nodes)} node(s), {found[0].gpu or 'no GPU'}, "
        f"{'all-reduce ' + format(speed, '.2f') + ' GB/s, ' if speed else ''}clocks within {skew:.2f} s, "
        f"at least {free / 1e9:.0f} GB free, {seconds:.0f} s",
        flush=True,
    )
