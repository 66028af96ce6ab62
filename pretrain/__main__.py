"""``python -m pretrain train CONFIG [section.key=value ...]``, ``plan CONFIG ...`` and ``inspect CHECKPOINT``."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pretrain.errors import SharedError, run_cli
from pretrain.hardware import DEFAULT_GPU, DEFAULT_MFU, GPUS


def main() -> None:
    """Parse the command line and start the job it names."""
    parser = argparse.ArgumentParser(prog="python -m pretrain", description="Pretrain a language model.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="pretrain a model, going on from the newest checkpoint in run.dir")
    train.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, for example configs/demo.yaml")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    _add_plan(commands)
    inspect = commands.add_parser("inspect", help="tell what a checkpoint holds, and let its model read a text")
    inspect.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step-..., or RUN: newest")
    inspect.add_argument("--text", type=Path, metavar="FILE", help="UTF-8: print loss and geometry of its reading")
    inspect.add_argument("--sequences", type=_positive, default=64, metavar="N", help="at most so many (default 64)")
    inspect.add_argument("--manifest", metavar="PATH", help="where the run's manifest.json is, if moved")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, rest = parser.parse_known_args()
    if "overrides" in arguments:
        # argparse takes no more of them once options have come between.
        arguments.overrides += [text for text in rest if not text.startswith("-")]
        rest = [text for text in rest if text.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")

    # Megatron-core overlaps tensor-parallel communication only then; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    # Imported late: they take seconds, and the checkpoint writer's helper process imports this file again.
    if arguments.command == "inspect":
        from pretrain.inspect_checkpoint import Inspection, run_inspection

        run_inspection(
            Inspection(
                path=arguments.checkpoint,
                text=arguments.text,
                sequences=arguments.sequences,
                manifest=arguments.manifest,
                as_json=arguments.json,
            )
        )
        return

    from pretrain.config import load_config

    if arguments.command == "plan":
        from pretrain.plan.command import PlanRequest, run_plan

        asked = PlanRequest(arguments.gpus, arguments.gpu, arguments.mfu, arguments.json)
        run_plan(load_config(arguments.config, arguments.overrides), asked)
        return

    from pretrain.launch import read_launch
    from pretrain.run import run_training

    run_training(load_config(arguments.config, arguments.overrides), read_launch())


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="tell what a run takes: memory, time, disk; starts nothing, needs no GPU")
    plan.add_argument("config", type=Path, metavar="CONFIG", help="as for train")
    plan.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for train")
    plan.add_argument("--gpus", type=_positive, metavar="N", help="over all machines (default: one machine's)")
    plan.add_argument("--gpu", choices=GPUS, default=DEFAULT_GPU, help="their kind (default %(default)s)")
    mfu = "share of its peak that a GPU reaches while it computes (default %(default)s)"
    plan.add_argument("--mfu", type=_share, default=DEFAULT_MFU, metavar="SHARE", help=mfu)
    plan.add_argument("--json", action="store_true", help="print one JSON object")


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


def _speaks(error: BaseException) -> bool:
    """Before process groups start all processes find the same mistake; later one may be alone with it."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return local_rank == "0"
    return distributed.get_rank() == 0 or not isinstance(error, (SharedError, KeyboardInterrupt))


if __name__ == "__main__":
    run_cli(main, _speaks)
