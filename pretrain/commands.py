"""The commands of ``python -m pretrain``: what each takes, and what it starts.

What a command needs is imported when it starts: Megatron-core and its like take seconds.
"""

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pretrain.errors import UserError
from pretrain.hardware import DEFAULT_GPU, DEFAULT_MFU, GPUS
from pretrain.resilience.signals import Signals
from pretrain.resilience.verdict import REQUEUE_STATUS, leave_end
from pretrain.resilience.wishes import Stop

STATUS = {Stop.NO: 0, Stop.WISH: 0, Stop.SIGNAL: REQUEUE_STATUS, Stop.INTERRUPT: 130}
"""Exit status of a run that ended in order, by why it stopped early."""


@dataclass(frozen=True)
class Command:
    """One of them.

    Attributes:
        name: as it is typed.
        help: in a line.
        add_arguments: tells the parser what it takes.
        run: starts it with what was typed.
    """

    name: str
    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


class _Parser(ArgumentParser):
    """Tells a mistake in one line, as all of ours are."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help tells what it takes")


def _as_setting(option: str) -> str:
    """How what was typed as an option is written as a setting."""
    from pretrain.config import Config
    from pretrain.config_file import setting_types

    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    near = sorted(setting for setting in setting_types(Config) if name in (setting, setting.rpartition(".")[2]))
    return f"; settings are written section.key=value, as in {near[0] if near else 'train.steps'}=VALUE"


def parse(arguments: Sequence[str] | None = None) -> tuple[Command, Namespace]:
    """The command that was typed, and what it was given; ends the process where help was asked for.

    Raises:
        UserError: there is no such command, or it takes no such arguments.
    """
    parser = _Parser(prog="python -m pretrain", description="Pretrain a language model.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_arguments(subparsers.add_parser(command.name, help=command.help))
    given, rest = parser.parse_known_args(arguments)
    if "overrides" in given:
        # argparse takes no more of them once options have come between.
        given.overrides += [text for text in rest if not text.startswith("-")]
        rest = [text for text in rest if text.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_as_setting(rest[0]) if 'overrides' in given else ''}")
    return next(command for command in COMMANDS if command.name == given.command), given


def _configured(parser: ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, for example configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")


def _train(given: Namespace) -> None:
    signals = Signals()  # before the imports, which take seconds

    from pretrain.config_file import load_config
    from pretrain.launch import read_launch
    from pretrain.run import run_training

    config = load_config(given.config, given.overrides)
    status = STATUS[run_training(config, read_launch(), signals, given.overrides)]
    signals.rest()
    if status == 0:
        leave_end()
    sys.exit(status)


def _preflight(given: Namespace) -> None:
    from pretrain.config_file import load_config
    from pretrain.launch import read_launch
    from pretrain.resilience.preflight import run_preflight

    run_preflight(load_config(given.config, given.overrides), read_launch())


def _planned(parser: ArgumentParser) -> None:
    _configured(parser)
    parser.add_argument("--gpus", type=_positive, metavar="N", help="over all machines (default: one machine's)")
    parser.add_argument("--gpu", choices=GPUS, default=DEFAULT_GPU, help="their kind (default %(default)s)")
    mfu = "share of its peak that a GPU reaches while it computes (default %(default)s)"
    parser.add_argument("--mfu", type=_share, default=DEFAULT_MFU, metavar="SHARE", help=mfu)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _plan(given: Namespace) -> None:
    from pretrain.config_file import load_config
    from pretrain.plan.command import PlanRequest, run_plan

    asked = PlanRequest(given.gpus, given.gpu, given.mfu, given.json)
    run_plan(load_config(given.config, given.overrides), asked)


def _inspected(parser: ArgumentParser) -> None:
    _of_a_checkpoint(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8: print loss and geometry of its reading")
    parser.add_argument("--sequences", type=_positive, default=64, metavar="N", help="at most so many (default 64)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file: list the settings that are others")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(given: Namespace) -> None:
    from pretrain.inspect_checkpoint import Inspection, run_inspection

    asked = Inspection(
        path=given.checkpoint,
        text=given.text,
        sequences=given.sequences,
        manifest=given.manifest,
        as_json=given.json,
        config=given.config,
    )
    run_inspection(asked)


def _evaluated(parser: ArgumentParser) -> None:
    _of_a_checkpoint(parser)
    text = "UTF-8, a document each, or .jsonl, a document a line in its field text"
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    parser.add_argument("--shards", nargs="+", default=[], metavar="MANIFEST", help="data of the model's tokenizer")
    parser.add_argument("--split", choices=["validation", "train"], default="validation", help="of the shards")
    parser.add_argument("--samples", type=_positive, metavar="N", help="at most so many of each data set (default all)")
    tasks = "tasks of lm-evaluation-harness: names of the ready list, paper for all of it, or YAML files"
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=tasks)
    parser.add_argument("--task-data", type=Path, metavar="DIR", help="folder of the ready tasks' files")
    parser.add_argument("--limit", type=_positive, metavar="N", help="documents of each task at most (default all)")
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="to compute in (default: the run's)")
    parser.add_argument("--micro-batch", type=_positive, metavar="N", help="sequences at a time (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _evaluate(given: Namespace) -> None:
    from pretrain.evaluate_checkpoint import Evaluation, run_evaluation

    asked = Evaluation(
        path=given.checkpoint,
        texts=given.text,
        shards=given.shards,
        split=given.split,
        samples=given.samples,
        tasks=given.tasks,
        task_data=given.task_data,
        limit=given.limit,
        manifest=given.manifest,
        precision=given.precision,
        micro_batch=given.micro_batch,
        as_json=given.json,
    )
    run_evaluation(asked)


def _exported(parser: ArgumentParser) -> None:
    _of_a_checkpoint(parser)
    parser.add_argument("--to", choices=["hf"], default="hf", help="the format")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights (default fp32)")


def _export(given: Namespace) -> None:
    from pretrain.export.hf import Export, run_export

    run_export(Export(given.checkpoint, given.out, given.dtype, given.manifest))


def _imported(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and safetensors files")
    parser.add_argument("--from", dest="origin", choices=["hf"], default="hf", help="the format")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to make, for train.init_from")


def _import(given: Namespace) -> None:
    from pretrain.export.from_hf import run_import

    run_import(given.model, given.to)


def _of_a_checkpoint(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step-..., or RUN: newest")
    parser.add_argument("--manifest", metavar="PATH", help="where the run's manifest.json is, if moved")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share above 0 and up to 1, for example 0.4")
    return value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


COMMANDS: Sequence[Command] = (
    Command("train", "pretrain a model, going on from the newest checkpoint in run.dir", _configured, _train),
    Command("preflight", "one process per GPU: check the nodes of a run, within a minute", _configured, _preflight),
    Command("plan", "tell what a run takes: memory, time, disk; starts nothing, needs no GPU", _planned, _plan),
    Command("inspect", "tell what a checkpoint holds, and let its model read a text", _inspected, _inspect),
    Command("evaluate", "measure a checkpoint: perplexity, bits per byte, zero-shot tasks", _evaluated, _evaluate),
    Command("export", "write a checkpoint as a model of Hugging Face's transformers", _exported, _export),
    Command("import", "make weights to start from of a Llama or GPT-2 of transformers", _imported, _import),
)
