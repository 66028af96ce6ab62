"""Time the retraction, forward and backward, against the norm and the sum that it replaces, and count what layers keep.

Every row is computed in turn with its peers, in at least 20 rounds by default; a ratio is the median of the rounds'
ratios, with 95 % bounds. CPU time over wall time is told: a figure for two threads counts only where it is near 2.
"""

import argparse

from tools.arguments import positive_int
from tools.bench.report import Report

SHAPES = ((2048, 1024), (4096, 2048))
"""(rows, hidden)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; its --threads is 1 and 2, one after the other, unless it is given."""
    parser.add_argument("--rounds", type=positive_int, default=20, metavar="N", help="timed turns (default: 20)")
    parser.add_argument("--only", choices=("time", "bytes"), help="only one of the two parts")
    parser.add_argument(
        "--shape",
        type=positive_int,
        nargs=2,
        metavar=("ROWS", "HIDDEN"),
        help="one shape (default: " + ", ".join(f"{rows} {hidden}" for rows, hidden in SHAPES) + ")",
    )


def run(arguments: argparse.Namespace) -> Report:
    """See :mod:`tools.bench.residual_timing` and :mod:`tools.bench.residual_bytes`."""
    from tools.bench import residual_bytes, residual_timing  # late: Megatron-core takes seconds to import

    texts, results = [], {}
    settings = {"rounds": arguments.rounds, "shapes": [arguments.shape] if arguments.shape else SHAPES}
    if arguments.only != "bytes":
        text, results["time"] = residual_timing.run(settings["shapes"], arguments.rounds, arguments.threads)
        texts.append(text)
    if arguments.only != "time":
        text, results["bytes"] = residual_bytes.run()
        texts.append(text)
    return Report("\n\n".join(texts), results, settings)
