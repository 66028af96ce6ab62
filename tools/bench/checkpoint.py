"""Time checkpoints against the disk: saving against writing as much, loading against reading as much.

Runs in one process, with a checkpoint of the preset's model: 12 bytes a parameter. What is written ends with an fsync;
what is read is first dropped from the system's cache. Tells the memory that saving and loading take as well.
"""

import argparse
from pathlib import Path

from tools.arguments import positive_int
from tools.bench.report import Report
from tools.bench.step import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", choices=PRESETS, default="125m", help="size of the model (default: 125m)")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="turns of each row (default: 5)")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk in question (default: here)")


def run(arguments: argparse.Namespace) -> Report:
    """See :func:`tools.bench.checkpoint_timing.run`."""
    from tools.bench import checkpoint_timing  # late: Megatron-core and DeepSpeed take seconds to import

    return checkpoint_timing.run(arguments)
