"""Time the retraction against the norm and the sum that it replaces, and whole steps; count what layers keep.

Every row is computed in turn with its peers, in at least 20 rounds by default; a ratio is the median of the rounds'
ratios, with 95 % bounds. CPU time over wall time is told: a figure for two threads counts only where it is near 2.
"""

import argparse

from pretrain.errors import UserError
from tools.arguments import positive_int
from tools.bench.report import Report
from tools.bench.step import PRESETS

SHAPES = ((2048, 1024), (4096, 2048))
"""(rows, hidden)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; its --threads is 1 and 2, one after the other, unless it is given."""
    parser.add_argument("--rounds", type=positive_int, default=20, metavar="N", help="timed turns (default: 20)")
    parser.add_argument("--only", choices=("time", "step", "bytes"), help="only one of the three parts")
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="size of the whole steps (default: demo)")
    parser.add_argument(
        "--layers", type=positive_int, default=8, metavar="N", help="whose bytes are counted (default: 8)"
    )
    parser.add_argument(
        "--shape",
        type=positive_int,
        nargs=2,
        metavar=("ROWS", "HIDDEN"),
        help="one shape (default: " + ", ".join(f"{rows} {hidden}" for rows, hidden in SHAPES) + ")",
    )


def run(arguments: argparse.Namespace) -> Report:
    """One part after the other; each is a module of its own.

    Raises:
        UserError: several processes; torch.compile does not work here.
    """
    import torch  # late, as Megatron-core takes seconds to import

    from megatron_ext.kernels.compiled import why_not_compile
    from tools.bench import residual_bytes, residual_step, residual_timing
    from tools.bench.alone import launched_alone

    launched_alone("residual")
    if arguments.only != "bytes" and (reason := why_not_compile(torch.device("cpu"))):
        raise UserError(f"residual compares compiled kernels, and torch.compile does not work here ({reason})")
    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES
    counts = residual_timing.thread_counts(arguments.threads)
    parts = {
        "time": lambda: residual_timing.run(shapes, arguments.rounds, counts),
        "step": lambda: residual_step.run(arguments.preset, arguments.rounds, counts),
        "bytes": lambda: residual_bytes.run(arguments.layers),
    }
    texts, results = [], {}
    for name in [arguments.only] if arguments.only else parts:
        text, results[name] = parts[name]()
        texts.append(text)
    settings = {"rounds": arguments.rounds, "shapes": shapes, "preset": arguments.preset}
    return Report("\n\n".join(texts), results, settings)
