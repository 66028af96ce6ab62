"""``python -m pretrain train|preflight CONFIG [section.key=value ...]``, and ``inspect``, ``export``, ``import``."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from pretrain.errors import SharedError, run_cli
from pretrain.resilience.signals import Signals
from pretrain.resilience.verdict import REQUEUE_STATUS, leave_verdict
from pretrain.resilience.wishes import Stop

STATUS = {Stop.NO: 0, Stop.WISH: 0, Stop.SIGNAL: REQUEUE_STATUS, Stop.INTERRUPT: 130}


def main() -> None:
    """Parse the command line and start the job it names."""
    parser = argparse.ArgumentParser(prog="python -m pretrain", description="Pretrain a language model.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="pretrain a model, going on from the newest checkpoint in run.dir")
    preflight = commands.add_parser("preflight", help="one process per GPU: check the nodes of a run, within a minute")
    for command in (train, preflight):
        command.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, for example configs/demo.yaml")
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
        )
    inspect = commands.add_parser("inspect", help="tell what a checkpoint holds, and let its model read a text")
    inspect.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step-..., or RUN: newest")
    inspect.add_argument("--text", type=Path, metavar="FILE", help="UTF-8: print loss and geometry of its reading")
    inspect.add_argument("--sequences", type=_positive, default=64, metavar="N", help="at most so many (default 64)")
    inspect.add_argument("--manifest", metavar="PATH", help="where the run's manifest.json is, if moved")
    inspect.add_argument("--config", type=Path, metavar="FILE", help="a YAML file: list the settings that are others")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    export = commands.add_parser("export", help="write a checkpoint as a model of Hugging Face's transformers")
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step-..., or RUN: newest")
    export.add_argument("--to", choices=["hf"], default="hf", help="the format")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    export.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights (default fp32)")
    export.add_argument("--manifest", metavar="PATH", help="where the run's manifest.json is, if moved")
    bring = commands.add_parser("import", help="make weights to start from of a Llama or GPT-2 of transformers")
    bring.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and safetensors files")
    bring.add_argument("--from", dest="origin", choices=["hf"], default="hf", help="the format")
    bring.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to make, for train.init_from")
    arguments = parser.parse_args()

    # Megatron-core overlaps tensor-parallel communication only then; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    # Imported late, so that help and mistakes are told at once.
    if arguments.command == "inspect":
        from pretrain.inspect_checkpoint import Inspection, run_inspection

        run_inspection(
            Inspection(
                path=arguments.checkpoint,
                text=arguments.text,
                sequences=arguments.sequences,
                manifest=arguments.manifest,
                as_json=arguments.json,
                config=arguments.config,
            )
        )
        return
    if arguments.command == "export":
        from pretrain.export.hf import Export, run_export

        run_export(Export(arguments.checkpoint, arguments.out, arguments.dtype, arguments.manifest))
        return
    if arguments.command == "import":
        from pretrain.export.from_hf import run_import

        run_import(arguments.model, arguments.to)
        return

    if arguments.command == "preflight":
        _preflight(arguments)
        return

    _train(arguments)


def _train(arguments: argparse.Namespace) -> NoReturn:
    signals = Signals()

    from pretrain.config import load_config
    from pretrain.launch import read_launch
    from pretrain.run import run_training

    sys.exit(STATUS[run_training(load_config(arguments.config, arguments.overrides), read_launch(), signals)])


def _preflight(arguments: argparse.Namespace) -> None:
    from pretrain.config import load_config
    from pretrain.launch import read_launch
    from pretrain.resilience.preflight import run_preflight

    run_preflight(load_config(arguments.config, arguments.overrides), read_launch())


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


def _end(status: int, error: BaseException | None) -> NoReturn:
    if error is not None:
        leave_verdict(requeue=False, reason=f"{type(error).__name__}: {error}")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        # Taking groups down would wait for the other ranks, and these wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run_cli(main, _speaks, _end)
