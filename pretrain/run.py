"""Assemble a run from its configuration, train it, and take it down."""

import dataclasses
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext import scheme_of
from pretrain import parallel
from pretrain.checkpoint import saving, store
from pretrain.checkpoint.callback import Saver
from pretrain.checkpoint.initial import InitialWeights, check_initial, find_initial, load_initial
from pretrain.config import Config, dump_config, with_scheme_defaults
from pretrain.data.ahead import ReadAhead
from pretrain.data.batches import Source, TrainingBatches, ValidationBatches, micro_batches
from pretrain.data.folder import Access
from pretrain.data.mixture import Mixture
from pretrain.data.order import SampleOrder
from pretrain.data.reader import MAX_OPEN_SHARDS, ShardReader
from pretrain.data.shard_index import check_files
from pretrain.datasets import Dataset, access, load_datasets, require_room, token_counts
from pretrain.engine import Engine
from pretrain.errors import SharedError
from pretrain.evaluate import HeldOut, Validation
from pretrain.feed import Feed, agree, needs_tokens
from pretrain.launch import Launch
from pretrain.loop import Callback, train
from pretrain.monitor.metrics import Metrics
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.recipe import advice
from pretrain.resume import changed_settings, check_resume, go_on_with_data, vocabulary
from pretrain.rules import check_config, check_data, check_layout
from pretrain.state import TrainState
from pretrain.together import Together, do_together


@dataclass(frozen=True)
class Start:
    """What was found before anything was started: the data, and where the run goes on or begins."""

    datasets: Sequence[Dataset]
    mixture: Mixture
    state: TrainState
    checkpoint: Path | None
    record: dict[str, Any]
    access: Access
    initial: InitialWeights | None = None


def run_training(config: Config, launch: Launch) -> None:
    """The main job: everything is checked first, then process groups start.

    Raises:
        UserError: for whatever the user can mend.
    """
    check_config(config)
    check_layout(config, launch.world_size)
    config = with_scheme_defaults(config)
    start = find_start(config)
    if start.state.step >= config.train.steps:
        if launch.global_rank == 0:
            print(f"{start.checkpoint} has all of train.steps={config.train.steps}; raise train.steps to go on")
        return
    store.require_writable(config.run.dir)
    place = parallel.start(launch, config.parallel, config.train.seed)
    with store.locked_run(config.run.dir) if place.global_rank == 0 else nullcontext(True) as locked:
        _agree(config, start.state, place, locked)
        train_from(config, start, place)
    parallel.stop()


def find_start(config: Config) -> Start:
    """Read the manifests and the newest complete checkpoint, and check them against the settings."""
    reached = access(config.data)
    datasets = load_datasets(config.data, reached)
    check_data(config, datasets)
    require_room(datasets, config.data, config.model.sequence_length)
    for dataset in datasets:
        check_files(dataset.manifest)
    checkpoint = store.newest(store.checkpoint_folder(config.run.dir))
    record, state = {}, TrainState()
    if checkpoint is not None:
        record = store.read_record(checkpoint)
        check_resume(config, datasets, checkpoint, record)
        state = TrainState.from_dict(record["state"])
    initial = None
    if checkpoint is None and config.train.init_from:
        initial = find_initial(config.train.init_from)
        check_initial(config, vocabulary(config, datasets), initial)
    mixture = go_on_with_data(config, datasets, state, checkpoint)
    return Start(datasets, mixture, state, checkpoint, record, reached, initial)


def train_from(config: Config, start: Start, place: Place) -> None:
    """Build the run's parts on running process groups and train to the end."""
    datasets, state = start.datasets, start.state
    vocab_size = vocabulary(config, datasets)
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    eod_id = datasets[0].manifest.eod_id if config.data.separate_documents else None
    engine = Engine(config, model, token_counts(datasets), place, eod_id)
    if start.checkpoint:
        saving.load(engine, start.checkpoint, vocab_size, start.record)
    elif start.initial:
        load_initial(engine, start.initial)
    board = Board(config.run.dir / "tensorboard", state.step, place.global_rank)
    batches = _training_batches(config, start, place)
    together = _together(config, datasets, place)
    # Closed before the thread that reads ahead is waited for, which may itself wait for a source.
    with (
        ReadAhead(batches.read if needs_tokens(config, place) else batches.stand_in) as ahead,
        closing(start.access),
    ):
        feed = Feed(config, batches, ahead, board, place, together)
        callbacks: list[Callback] = [feed, Saver(config, datasets, engine, vocab_size)]
        if config.validation.every:
            callbacks.insert(1, Validation(config, engine, board, _held_out(config, datasets, place, together)))
        _announce(config, start, engine, board)
        train(config, state, engine, feed, Metrics(config, engine, board), callbacks)
    board.close()


def _training_batches(config: Config, start: Start, place: Place) -> TrainingBatches:
    sources = []
    for dataset in start.datasets:
        # What is open is kept in the cache: no more than a block needs.
        at_a_time = dataset.window(config.model.sequence_length).shards
        max_open = MAX_OPEN_SHARDS // len(start.datasets)
        if not dataset.manifest.folder.is_local:
            max_open = min(max_open, at_a_time)
        reader = _reader(config, dataset, "train", place, max_open)
        order = SampleOrder(reader.shard_sizes, config.train.seed, start.mixture.orders[dataset.manifest.fingerprint])
        sources.append(Source(reader, order))
    train = config.train
    return TrainingBatches(
        sources, start.mixture, train.micro_batch, train.global_batch, dp_rank=place.dp_rank, dp_size=place.dp_size
    )


def _together(config: Config, datasets: Sequence[Dataset], place: Place) -> Together | None:
    """Where one rank alone may fail to get its samples; collective."""
    if place.world_size == 1 or all(dataset.manifest.folder.is_local for dataset in datasets):
        return None
    return Together(60 * config.data.source_timeout_minutes)


def _held_out(config: Config, datasets: Sequence[Dataset], place: Place, together: Together | None) -> list[HeldOut]:
    """This rank's micro batches of each data set's validation split; collective."""
    found = []
    for dataset in datasets:
        if "validation" not in dataset.manifest.splits:
            continue
        reader = _reader(config, dataset, "validation", place)
        batches = ValidationBatches(
            reader, config.validation.samples, config.train.micro_batch, place.dp_rank, place.dp_size
        )
        rows = do_together(together, batches.read)
        cut = micro_batches(torch.from_numpy(rows.tokens), agree(rows, place), config.train.micro_batch)
        found.append(HeldOut(dataset.name, dataset.weight, cut))
    return found


def _reader(config: Config, dataset: Dataset, split: str, place: Place, max_open: int | None = None) -> ShardReader:
    """One of tensor-parallel ranks, which share a machine, tells of the damage that all of them find."""

    def report(fault: str) -> None:
        if place.tp_rank == 0:
            print(f"warning: masked, data set {dataset.name}: {fault}", flush=True)

    return ShardReader(dataset.manifest, split, config.model.sequence_length, report, max_open)


def _agree(config: Config, state: TrainState, place: Place, locked: bool) -> None:
    """Go on only if the run folder is ours and all ranks found the same checkpoint in it.

    Raises:
        SharedError: another run holds the folder, or it is not the same folder on all nodes.
    """
    facts = torch.tensor([state.step, -state.step, not locked], device=place.device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    highest, lowest, taken = int(facts[0]), -int(facts[1]), bool(facts[2])
    if taken:
        raise SharedError(f"run.dir={config.run.dir} is in use by another run; stop it or choose another run.dir")
    if highest != lowest:
        raise SharedError(
            f"run.dir={config.run.dir}: ranks found checkpoints of different steps ({lowest} and {highest}); "
            f"put run.dir on a file system that all nodes share"
        )


def _beginning(config: Config, start: Start) -> str:
    if start.checkpoint:
        return f"resumed from {start.checkpoint}"
    return f"{config.train.steps} steps from " + (
        f"the weights of {start.initial.folder}" if start.initial else "scratch"
    )


def _announce(config: Config, start: Start, engine: Engine, board: Board) -> None:
    """Say once what starts: parameters, layout, place of the run."""
    place, parallelism = engine.place, config.parallel
    parameters = engine.count_parameters()
    board.text("run/config", f"```yaml\n{dump_config(config)}```", start.state.step)
    if place.global_rank != 0:
        return
    (config.run.dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    print(
        f"{config.model.residual.scheme}: {parameters / 1e6:.1f} M parameters, {config.train.precision}, "
        f"tp {parallelism.tp} x pp {parallelism.pp} x dp {place.dp_size}, ZeRO-{config.zero.stage}, "
        f"{'sequence parallel, ' if parallelism.sp else ''}on {place.device.type}\n"
        f"run folder {config.run.dir}, " + _beginning(config, start),
        flush=True,
    )
    residual = config.model.residual
    for line in advice(residual.scheme, scheme_of(residual).on_sphere, config.model.output_bias):
        print(f"warning: {line}", flush=True)
    for change in changed_settings(config, start.record) if start.checkpoint else []:
        print(f"changed since then: {change}", flush=True)
