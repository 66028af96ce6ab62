"""Every check that needs a GPU in one command: kernels against fp64, their bandwidth, steps of 1.3B parameters.

Made for one H200 that is lent for minutes: what cannot begin within --budget seconds is told as NOT RUN, and a check
that fails takes only its own line with it. A short table of what is wanted and what was measured comes last.
"""

import argparse

from tools.arguments import positive_int
from tools.bench.report import Report

BUDGET = 330
"""Seconds: with the imports before it and the last check's end the whole stays below six minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--tiny", action="store_true", help="try the same code at a tiny size, on the CPU where there is no GPU"
    )
    parser.add_argument(
        "--budget",
        type=positive_int,
        default=BUDGET,
        metavar="S",
        help=f"seconds after which no further check begins (default: {BUDGET})",
    )


def run(arguments: argparse.Namespace) -> Report:
    """See :func:`tools.bench.gpu_checks.run`."""
    from tools.bench import gpu_checks  # late: Megatron-core and DeepSpeed take seconds to import

    return gpu_checks.run(arguments)
