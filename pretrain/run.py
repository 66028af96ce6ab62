"""Assemble a run from its configuration, train it, and take it down."""

import dataclasses
import gc
from collections.abc import Sequence
from contextlib import closing, nullcontext

from megatron_ext import scheme_of, what_backend_lacks
from pretrain import parallel
from pretrain.agreement import require_agreement
from pretrain.checkpoint import store
from pretrain.checkpoint.callback import Saver, checkpoint_group
from pretrain.config import Config, with_scheme_defaults
from pretrain.config_file import dump_config
from pretrain.data.ahead import ReadAhead
from pretrain.engine import Engine
from pretrain.errors import UserError
from pretrain.evaluate import Validation
from pretrain.feed import Feed, needs_tokens
from pretrain.kernels import with_kernels
from pretrain.launch import Launch
from pretrain.loop import Callback, train
from pretrain.monitor.hparams import CURVES as COMPARED
from pretrain.monitor.hparams import compared_settings, shown_first
from pretrain.monitor.metrics import Metrics
from pretrain.monitor.profiler import Profiler
from pretrain.monitor.stragglers import Stragglers
from pretrain.monitor.tensorboard import Board
from pretrain.monitor.timed import Timed
from pretrain.parallel import Place
from pretrain.recipe import advice
from pretrain.recovery import reports
from pretrain.recovery.describe import Describer
from pretrain.recovery.guard import SpikeGuard
from pretrain.recovery.rollback import GoingBack
from pretrain.resilience.caretaker import Caretaker
from pretrain.resilience.signals import Signals
from pretrain.resilience.wishes import Stop
from pretrain.resume import changed_settings, vocabulary
from pretrain.rules import check_config, check_layout
from pretrain.start import Start, find_start, load_start


def run_training(config: Config, launch: Launch, signals: Signals, overrides: Sequence[str] = ()) -> Stop:
    """The main job: everything is checked first, then process groups start. Returns why it stopped early, if it did.

    ``overrides`` are those of the command line, already in ``config``: by them runs are compared.

    Raises:
        UserError: for whatever the user can mend.
    """
    check_config(config)
    check_layout(config, launch.world_size)
    if lacking := what_backend_lacks(config.model.backend):
        raise UserError(f"model.backend={config.model.backend} needs {lacking}; install it or set model.backend=local")
    config = with_kernels(with_scheme_defaults(config), loud=launch.global_rank == 0)
    start = find_start(config, launch.world_size)
    if start.state.step >= config.train.steps:
        if launch.global_rank == 0:
            print(f"{start.checkpoint} has all of train.steps={config.train.steps}; raise train.steps to go on")
        return Stop.NO
    store.require_writable(config.run.dir)
    caretaker = Caretaker(config, launch, signals, start.state.step)
    gc.freeze()  # what is imported stays: collections, of which DeepSpeed asks for many, need not walk over it
    place = parallel.start(launch, config.parallel, config.train.seed)
    with store.locked_run(config.run.dir) if place.global_rank == 0 else nullcontext(True) as locked:
        # A run that held the folder while we looked into it may have saved since.
        ours = locked and (place.global_rank != 0 or _is_newest(config, start))
        require_agreement(config, start.data.facts, start.state, ours)
        stop = train_from(config, start, place, caretaker, overrides)
    parallel.stop()
    return stop


def _is_newest(config: Config, start: Start) -> bool:
    return start.newest == store.newest(store.checkpoint_folder(config.run.dir))


def train_from(config: Config, start: Start, place: Place, caretaker: Caretaker, overrides: Sequence[str] = ()) -> Stop:
    """Build the run's parts on running process groups and train to the end, or to where the run is told to stop."""
    facts = start.data.facts
    vocab_size = vocabulary(config, facts)
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    engine = Engine(config, model, facts.token_counts, place, facts.eod_id if config.data.separate_documents else None)
    group = checkpoint_group()
    start = load_start(config, start, engine, vocab_size, group)
    data, state = start.data, start.state
    if place.global_rank == 0 and data.notice():
        print(data.notice(), flush=True)
    board = Board(config.run.dir / "tensorboard", state.step, place.global_rank, state.tokens)
    if start.checkpoint is None and place.global_rank == 0:
        reports.set_aside(config.run.dir)
    batches = data.batches(config, state, place)
    together = data.together(config, place)
    # The data are closed before the thread that reads ahead is waited for, which may itself wait for a source.
    with (
        ReadAhead(batches.read if needs_tokens(config, place) else batches.stand_in) as ahead,
        closing(data),
        Saver(config, facts, engine, vocab_size, group) as saver,
    ):
        feed = Feed(config, batches, ahead, board, place, together)
        callbacks: list[Callback] = [feed, *data.callbacks(config, board, place)]
        _announce(config, start, engine, board, overrides)
        metrics = Metrics(config, model, engine, board)
        with caretaker.look_after(state, board, place) as pulse:
            if config.validation.every:
                validation = Validation(config, engine, board, pulse, data.held_out(config, place, together))
                validation.make_up(state)
                callbacks.append(Timed("validation", validation, metrics.phases))
            if place.world_size > 1:
                callbacks.append(Stragglers(config, engine, board, caretaker.hosts))
            if config.profile.window:
                callbacks.append(caretaker.patiently(Profiler(config, place, state)))
            callbacks += [caretaker.patiently(Timed("checkpoint", saver, metrics.phases)), caretaker]
            describer = Describer(config, engine, data, batches, group)
            back = GoingBack(config, engine, saver, vocab_size, group, data)
            guard = SpikeGuard(config, engine, board, feed, metrics, describer, back, pulse.patience)
            guard.start(state)
            callbacks.insert(0, guard)
            stop = pulse.wishes.stop or train(config, state, engine, feed, metrics, guard, callbacks, pulse)
            saver.finish()
        caretaker.end(stop, state)
    board.close()
    return stop


def _write_config(config: Config) -> None:
    try:
        (config.run.dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.dir={config.run.dir}: cannot write config.yaml there: {error.strerror}") from None


def _beginning(config: Config, start: Start) -> str:
    if start.checkpoint:
        return f"resumed from {start.checkpoint}"
    return f"{config.train.steps} steps from " + (
        f"the weights of {start.initial.folder}" if start.initial else "scratch"
    )


def _announce(config: Config, start: Start, engine: Engine, board: Board, overrides: Sequence[str]) -> None:
    """Say once what starts: parameters, layout, place of the run."""
    place, parallelism = engine.place, config.parallel
    parameters = engine.count_parameters()
    board.text("system/config", f"```yaml\n{dump_config(config)}```", start.state.step)
    board.settings(compared_settings(config), shown_first(overrides), COMPARED)
    if place.global_rank != 0:
        return
    _write_config(config)
    print(
        f"{config.model.residual.scheme}: {parameters / 1e6:.1f} M parameters, {config.train.precision}, "
        f"{parallelism.described()} x dp {place.dp_size}, ZeRO-{config.zero.stage}"
        f"{' offloaded' if config.zero.offload_optimizer else ''}, "
        f"{'sequence parallel, ' if parallelism.sp else ''}{config.model.kernels} kernels on {place.device.type}\n"
        f"run folder {config.run.dir}, " + _beginning(config, start),
        flush=True,
    )
    residual = config.model.residual
    for line in advice(
        residual.scheme, scheme_of(residual).on_sphere, config.model.output_bias, config.data.mode == "shards"
    ):
        print(f"warning: {line}", flush=True)
    for change in changed_settings(config, start.record) if start.checkpoint else []:
        print(f"changed since then: {change}", flush=True)
