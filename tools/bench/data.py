"""Time the data's ways: shuffled reading beside other readers, a resume, a reader's memory, tokenising, building.

Everything is made anew in a folder that is removed in the end: some 1.2 GB for the reading, and for the resume and the
memory one shard and thousands of links to it. Readers get the same warm files, samples, types and batches.
"""

import argparse
from pathlib import Path

from tools.arguments import positive_int
from tools.bench.report import Report

PARTS: dict[str, str] = {
    "reading": "tools.bench.data_reading",
    "resume": "tools.bench.data_resume",
    "memory": "tools.bench.data_memory",
    "tokenizing": "tools.bench.data_tokenizing",
    "building": "tools.bench.data_building",
}
"""Part -> module with ``measure(arguments, folder) -> Section``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--rounds", type=positive_int, metavar="N", help="of each part (default: the part's own)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="make the files in there (default: the system's)")
    parser.add_argument(
        "--sequence-length", type=positive_int, default=4096, metavar="L", help="of samples (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", type=positive_int, default=1 << 15, metavar="N", help="to read from (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive_int, default=32, metavar="N", help="samples of a call (default: %(default)s)"
    )
    parser.add_argument(
        "--resume-samples", type=positive_int, default=50_000_000, metavar="N", help="default: 50 million"
    )
    parser.add_argument(
        "--memory-samples", type=positive_int, default=1_000_000_000, metavar="N", help="default: a billion"
    )
    parser.add_argument(
        "--text-bytes", type=positive_int, default=4_000_000, metavar="N", help="to tokenise (default: 4 million)"
    )
    parser.add_argument(
        "--processes", type=positive_int, nargs="+", default=[1, 2], metavar="N", help="of builds (default: 1 2)"
    )


def run(arguments: argparse.Namespace) -> Report:
    """See :func:`tools.bench.data_parts.run`."""
    from tools.bench import data_parts  # late: torch takes seconds to import

    return data_parts.run(arguments)
