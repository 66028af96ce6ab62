"""One of two ranks: ``MANIFEST FOLDER``. Real runs in this one world that fail to save, meet damage, go on."""

import dataclasses
import json
import math
import resource
import shutil
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed import ProcessGroup

from pretrain import parallel
from pretrain.checkpoint import saving, store
from pretrain.checkpoint.initial import write_initial
from pretrain.checkpoint.record import RECORD
from pretrain.checkpoint.weights import StoredWeights
from pretrain.checkpoint.writing import Job, write
from pretrain.config import Config, with_scheme_defaults
from pretrain.config_file import load_config
from pretrain.data.batch import MicroBatch
from pretrain.engine import Engine
from pretrain.errors import SharedError
from pretrain.inspect_checkpoint import recorded_config
from pretrain.launch import read_launch
from pretrain.resilience.caretaker import Caretaker
from pretrain.resilience.signals import Signals
from pretrain.run import train_from
from pretrain.start import find_start
from tests.launch import REPOSITORY
from tests.pretrain.checkpoint.small import flip_a_byte, forge_common, forge_contents, forge_tensors, reseal
from tests.pretrain.runs import SMALL

MANIFEST, FOLDER = sys.argv[1], Path(sys.argv[2])
RUN = [f"data.manifest={MANIFEST}", "parallel.tp=2", "model.dropout=0.1", "train.steps=8", "optimizer.warmup_steps=1"]
RUN += ["checkpoint.every=2", "validation.every=2", "logging.every=1"]
LAUNCH, SIGNALS = read_launch(), Signals()
PLACE = parallel.start(LAUNCH, load_config(REPOSITORY / "configs/demo.yaml", RUN).parallel, seed=0)
LEADS = PLACE.global_rank == 0


def config(name: str, *overrides: str) -> Config:
    settings = [*SMALL, *RUN, f"run.dir={FOLDER / name}", *overrides]
    return with_scheme_defaults(load_config(REPOSITORY / "configs/demo.yaml", settings))


def train(name: str, *overrides: str) -> str:
    """Run to the end: what it was refused with, else nothing."""
    settings = config(name, *overrides)
    try:
        start = find_start(settings, PLACE.world_size)
        store.require_writable(settings.run.dir)
        train_from(settings, start, PLACE, Caretaker(settings, LAUNCH, SIGNALS, start.state.step))
    except SharedError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    return ""


def steps(name: str) -> list[int]:
    torch.distributed.barrier()
    return [store.step_of(path) for path in store.checkpoints(FOLDER / name / "checkpoints")]


def names(name: str) -> list[str]:
    return sorted(path.name for path in (FOLDER / name / "checkpoints").iterdir())


def copy(name: str, kept: tuple[int, ...]) -> Path:
    """A run of its own with these checkpoints of the whole run; returns the newest."""
    for step in kept if LEADS else ():
        folder = f"checkpoints/step-{step:08d}"
        shutil.copytree(FOLDER / "whole" / folder, FOLDER / name / folder)
    torch.distributed.barrier()
    return FOLDER / name / f"checkpoints/step-{kept[-1]:08d}"


def on_one_rank(action: object, *arguments: object) -> None:
    if LEADS:
        action(*arguments)
    torch.distributed.barrier()


def settings_decide_what_is_kept() -> None:
    assert train("whole") == ""
    assert steps("whole") == [8, 6, 4, 2]
    kept = ["checkpoint.keep_last=1", "checkpoint.keep_every=4", "checkpoint.keep_best=true"]
    assert train("kept", *kept) == ""
    losses = {}
    for step in (2, 4, 6, 8):
        record = store.read_record(FOLDER / "whole" / f"checkpoints/step-{step:08d}")
        losses[record["state"]["callbacks"]["validation"]["loss"]] = step
    assert steps("kept") == sorted({8, 4, losses[min(losses)]}, reverse=True)


def both_ways_of_saving_write_the_same() -> None:
    assert train("at_once", "checkpoint.asynchronous=false") == ""
    for step in (2, 4, 6, 8):
        files = [
            json.loads((FOLDER / run / f"checkpoints/step-{step:08d}" / RECORD).read_text())["files"]
            for run in ("whole", "at_once")
        ]
        assert files[0] == files[1], step
        assert "__1_0.distcp" in files[0]


def a_damaged_file_stops_the_run_or_the_one_before_is_taken() -> None:
    newest = copy("damaged", (2, 4))
    on_one_rank(flip_a_byte, newest / "__1_0.distcp")
    said = train("damaged")
    assert said.startswith(f"{newest} is damaged: __1_0.distcp has the crc32 "), said
    assert steps("damaged") == [4, 2]
    assert train("damaged", "checkpoint.on_damage=previous") == ""
    assert names("damaged") == [f"step-0000000{end}" for end in ("2", "4", "4.damaged", "6", "8")]


def a_damaged_record_too() -> None:
    newest = copy("record", (2, 4))
    on_one_rank((newest / RECORD).write_text, "{")
    assert "checkpoint.on_damage=previous goes on from the one before" in train("record")
    assert train("record", "checkpoint.on_damage=previous") == ""
    assert names("record") == [f"step-0000000{end}" for end in ("2", "4", "4.damaged", "6", "8")]


def nothing_is_thrown_away_when_all_are_damaged() -> None:
    newest = copy("lost", (2, 4))
    on_one_rank((newest / RECORD).write_text, "{")
    on_one_rank(flip_a_byte, newest.with_name("step-00000002") / "__0_0.distcp")
    said = train("lost", "checkpoint.on_damage=previous")
    assert said.startswith(f"{newest} is damaged: "), said
    assert said.endswith("; there is no sound one before it; restore its files, or choose another run.dir"), said
    assert names("lost") == ["step-00000002", "step-00000004"]


def weights_must_be_what_their_record_tells() -> None:
    checkpoint, folder = FOLDER / "whole/checkpoints/step-00000008", FOLDER / "weights"
    weights = StoredWeights(checkpoint)
    record = store.read_record(checkpoint)
    model = dataclasses.replace(recorded_config(checkpoint, record).model, num_layers=4)
    on_one_rank(folder.mkdir)
    on_one_rank(write_initial, weights, model, record["vocab_size"], "a run of two layers", folder)
    said = train("initial", f"train.init_from={folder}", "model.num_layers=4")
    assert said.startswith(f"{folder} does not fit its own record: decoder.layers.2."), said
    assert "is missing instead of" in said, said


def what_a_stranger_put_in_is_not_run() -> None:
    for forge in (forge_contents, forge_tensors):
        newest, mark = copy(forge.__name__, (2,)), FOLDER / "mark"
        on_one_rank(forge, newest, mark)
        said = train(forge.__name__)
        assert str(newest) in said, said
        assert "which is no part of a checkpoint" in said or "tensors cannot be read" in said, said
        assert not mark.exists()
    on_one_rank(forge_common, copy("common", (2,)), FOLDER / "mark")
    assert train("common") == ""
    assert not (FOLDER / "mark").exists()
    on_one_rank(reseal, copy("resealed", (2,)))  # the forger's tool itself leaves a checkpoint whole
    assert train("resealed") == ""


def one_rank_that_cannot_write_costs_all_the_checkpoint_alike() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, more in (("goes_on", []), ("at_once_goes_on", ["checkpoint.asynchronous=false"])):
        copy(name, (2,))
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if LEADS else 300_000, before[1]))  # its file is larger
        said = train(name, *more)
        assert "the checkpoint of step 8 could not be written to" in said, said
        assert "File too large; make room and start again from" in said, said
        assert names(name) == ["step-00000002"]
        said = train(name, *more, "checkpoint.on_failed_save=stop")
        assert "the checkpoint of step 4 could not be written to" in said, said
        assert "checkpoint.on_failed_save=go_on" in said, said
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert train(name, *more) == ""
        assert names(name) == [f"step-0000000{step}" for step in (2, 4, 6, 8)]


def what_began_becomes_durable_when_the_training_breaks() -> None:
    def slowly(job: Job, group: ProcessGroup) -> str | None:
        time.sleep(1)
        return write(job, group)

    def broken(engine: Engine, micro_batches: list[MicroBatch], step: int) -> torch.Tensor:
        if step == 2:
            raise KeyboardInterrupt
        return forward_backward(engine, micro_batches, step)

    forward_backward = Engine.forward_backward
    with patch.object(saving, "write", slowly), patch.object(Engine, "forward_backward", broken):
        with pytest.raises(KeyboardInterrupt):
            train("broken")
        assert names("broken") == ["step-00000002"]


def a_step_that_was_not_finite_is_not_saved() -> None:
    begun = []

    def noted(engine: Engine, micro_batches: list[MicroBatch], step: int) -> torch.Tensor:
        begun.append(step)
        return forward_backward(engine, micro_batches, step)

    def overflowing(engine: Engine) -> torch.Tensor:
        return torch.tensor(math.inf) if len(begun) == 4 else grad_norm(engine)

    forward_backward, grad_norm = Engine.forward_backward, Engine.grad_norm
    with patch.object(Engine, "forward_backward", noted), patch.object(Engine, "grad_norm", overflowing):
        assert train("overflow", "checkpoint.every=4", "logging.every=8") == ""
    assert steps("overflow") == [8]


def main() -> None:
    torch.set_num_threads(1)
    settings_decide_what_is_kept()
    both_ways_of_saving_write_the_same()
    a_damaged_file_stops_the_run_or_the_one_before_is_taken()
    a_damaged_record_too()
    nothing_is_thrown_away_when_all_are_damaged()
    weights_must_be_what_their_record_tells()
    what_a_stranger_put_in_is_not_run()
    one_rank_that_cannot_write_costs_all_the_checkpoint_alike()
    what_began_becomes_durable_when_the_training_breaks()
    a_step_that_was_not_finite_is_not_saved()
    parallel.stop()
    print("all checks passed")


if __name__ == "__main__":
    main()
