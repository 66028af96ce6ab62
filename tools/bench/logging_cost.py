"""What watching a run costs: steps with everything that `logging` measures and writes, against steps without any of it.

One process, one model, interleaved steps; on the GPU where CUDA is. A log step measures the residual stream and the
norms per layer, reduces, and writes all curves to a disk; the steps between only keep their results.
"""

import argparse

from tools.arguments import positive_int
from tools.bench.report import Report
from tools.bench.step import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="size of the model (default: demo)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--rounds", type=positive_int, default=15, metavar="N", help="timed steps of each row (default: 15)"
    )
    parser.add_argument(
        "--micro-batch", type=positive_int, metavar="N", help="samples of one micro batch; a step takes two of them"
    )


def run(arguments: argparse.Namespace) -> Report:
    """See :func:`tools.bench.logging_timing.run`."""
    from tools.bench import logging_timing  # late: Megatron-core and DeepSpeed take seconds to import

    return logging_timing.run(arguments)
