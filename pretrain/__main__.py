"""``python -m pretrain train CONFIG [section.key=value ...]``."""

import argparse
import os
import sys
from pathlib import Path

from pretrain.errors import SharedError, run_cli


def main() -> None:
    """Parse the command line and start the job it names."""
    parser = argparse.ArgumentParser(prog="python -m pretrain", description="Pretrain a language model.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="pretrain a model, going on from the newest checkpoint in run.dir")
    train.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, for example configs/demo.yaml")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    arguments = parser.parse_args()

    # Megatron-core overlaps tensor-parallel communication only then; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    # Imported late: they take seconds, and the checkpoint writer's helper process imports this file again.
    from pretrain.config import load_config
    from pretrain.launch import read_launch
    from pretrain.run import run_training

    run_training(load_config(arguments.config, arguments.overrides), read_launch())


def _speaks(error: BaseException) -> bool:
    """Before process groups start all processes find the same mistake; later one may be alone with it."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return local_rank == "0"
    return distributed.get_rank() == 0 or not isinstance(error, (SharedError, KeyboardInterrupt))


if __name__ == "__main__":
    run_cli(main, _speaks)
