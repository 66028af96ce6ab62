"""``python -m pretrain train CONFIG [section.key=value ...]``."""

import argparse
from pathlib import Path

from pretrain.errors import run_cli


def main() -> None:
    """Parse the command line and start the job it names."""
    parser = argparse.ArgumentParser(prog="python -m pretrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="pretrain a model, going on from the newest checkpoint in run.dir")
    train.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, for example configs/demo.yaml")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    arguments = parser.parse_args()

    # Imported late: the checkpoint writer's helper process imports this file again.
    from pretrain.config import load_config
    from pretrain.launch import read_launch
    from pretrain.run import run_training

    run_training(load_config(arguments.config, arguments.overrides), read_launch())


if __name__ == "__main__":
    run_cli(main)
