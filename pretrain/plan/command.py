"""``python -m pretrain plan CONFIG``: what a run will take, before anything starts."""

import json
from dataclasses import dataclass

from pretrain.config import Config, with_scheme_defaults
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.urls import is_remote, local_path
from pretrain.datasets import facts_of, load_datasets, named
from pretrain.errors import UserError
from pretrain.hardware import DEFAULT_GPU, DEFAULT_MFU, GPUS
from pretrain.plan.disk import checkpoint_disk
from pretrain.plan.layouts import Layout, Machines, best_layout, changes, measured, rate
from pretrain.plan.memory import model_parameters, parameters_held, stage_of
from pretrain.plan.page import page
from pretrain.plan.plan import Plan
from pretrain.plan.timing import bubble_share, step_flops
from pretrain.plan.warnings import warnings_of
from pretrain.rampup import steps_by_batch
from pretrain.resume import vocabulary
from pretrain.rules import check_config, check_data, check_layout

_WORTH = 0.95
"""Of the time, below which another layout is worth telling."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        gpus: over all machines; None for a whole machine, or as many more as tp x pp needs.
        gpu: a name in :data:`pretrain.hardware.GPUS`.
        mfu: share of the peak that is reached while a GPU computes, in (0, 1].
        as_json: print one JSON object.
    """

    gpus: int | None = None
    gpu: str = DEFAULT_GPU
    mfu: float = DEFAULT_MFU
    as_json: bool = False


def run_plan(config: Config, asked: PlanRequest) -> None:
    """Print the plan.

    Raises:
        UserError: settings that a run would refuse, or a vocabulary that nothing tells.
    """
    plan = make_plan(config, asked)
    print(json.dumps(plan.to_dict()) if asked.as_json else page(plan))


def make_plan(config: Config, asked: PlanRequest) -> Plan:
    """The plan of a run; raises as :func:`run_plan`."""
    check_config(config)
    config = with_scheme_defaults(config)
    vocab_size, epoch_tokens = _data(config)
    machines = _machines(config, asked)
    try:
        check_layout(config, machines.gpus)
    except UserError as error:
        other = best_layout(config, vocab_size, machines)
        raise UserError(f"{error}{_advice(config, other)}") from None
    parts = measured(config, vocab_size)
    layout = rate(config, parts, vocab_size, machines)
    dp = machines.gpus // config.parallel.ranks_of_a_replica
    parameters = model_parameters(config, parts)
    warnings = warnings_of(layout, machines)
    return Plan(
        config=config,
        vocab_size=vocab_size,
        machines=machines,
        dp=dp,
        parameters=parameters,
        parameters_of_ranks=[
            parameters_held(config, parts, stage_of(config, dp, rank)) for rank in range(config.parallel.pp)
        ],
        layout=layout,
        seconds=sum(
            count * rate(_with_batch(config, batch), parts, vocab_size, machines).time.total
            for batch, count in steps_by_batch(config.train.steps, config.train)
        ),
        flops=step_flops(config, vocab_size),
        bubble=bubble_share(config, dp),
        disk=checkpoint_disk(config, parameters),
        epoch_tokens=epoch_tokens,
        warnings=warnings,
        better=_better(layout, best_layout(config, vocab_size, machines), machines),
    )


def _with_batch(config: Config, batch: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})


def _machines(config: Config, asked: PlanRequest) -> Machines:
    gpu = GPUS[asked.gpu]
    ranks = config.parallel.ranks_of_a_replica
    return Machines(asked.gpus or ranks * -(-gpu.per_node // ranks), gpu, asked.mfu)


def _data(config: Config) -> tuple[int, int | None]:
    """Vocabulary, and tokens of one epoch where the data are at hand."""
    places = [dataset.manifest for dataset in named(config.data)]
    if places and all(not is_remote(place) and local_path(place).exists() for place in places):
        datasets = load_datasets(config.data)
        check_data(config, datasets)
        sequence = config.model.sequence_length
        return vocabulary(config, facts_of(datasets)), sum(dataset.samples(sequence) * sequence for dataset in datasets)
    if config.data.tokenizer is not None and config.data.tokenizer.exists():
        return config.model.vocab_size or Tokenizer(config.data.tokenizer, config.data.eod_id).vocab_size, None
    if config.model.vocab_size is None:
        where = ", ".join(places) or f"data.tokenizer={config.data.tokenizer}"
        raise UserError(f"{where} cannot be read here, so the vocabulary is unknown; give it as model.vocab_size=N")
    return config.model.vocab_size, None


def _better(now: Layout, best: Layout | None, machines: Machines) -> Layout | None:
    """The best layout if it is worth a change: what is told of its time is an estimate."""
    if best is None or not changes(now.config, best.config):
        return None
    fits = now.memory.total <= machines.usable_bytes
    return best if not fits or best.time.total < _WORTH * now.time.total else None


def _advice(config: Config, other: Layout | None) -> str:
    return f"; this would work: {' '.join(changes(config, other.config))}" if other else ""
