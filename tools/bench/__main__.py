"""``python -m tools.bench NAME [--json PATH] [option ...]``; ``NAME --help`` tells a benchmark's own options."""

import argparse
import dataclasses
import importlib
import json
import sys
import warnings
from pathlib import Path

from pretrain.errors import UserError, run_cli
from tools.arguments import positive_int
from tools.bench import BENCHMARKS


def main() -> None:
    """Run the benchmark that the command line names, print its table and write its JSON."""
    door = argparse.ArgumentParser(prog="python -m tools.bench", description="Time something against its peers.")
    door.add_argument("name", metavar="NAME", choices=BENCHMARKS, help=f"one of: {', '.join(BENCHMARKS)}")
    door.add_argument("options", nargs=argparse.REMAINDER, help="see NAME --help")
    asked = door.parse_args()

    # Megatron-core warns about kernels that this project does not use.
    warnings.filterwarnings("ignore", module="megatron")
    benchmark = importlib.import_module(BENCHMARKS[asked.name])
    parser = argparse.ArgumentParser(prog=f"python -m tools.bench {asked.name}", description=benchmark.__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results, machine and settings there too")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="that torch computes with on the CPU")
    benchmark.add_arguments(parser)
    arguments = parser.parse_args(asked.options)
    if arguments.json is not None:
        _check_writable(arguments.json)

    # Imported late, so that help and mistakes are told at once.
    import torch

    from tools.bench.machine import this_machine

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    machine = this_machine()
    report = benchmark.run(arguments)
    print(f"{machine}\n\n{report.text}")
    if arguments.json is not None:
        content = {
            "benchmark": asked.name,
            "machine": dataclasses.asdict(machine),
            "settings": report.settings,
            "results": report.results,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if report.failed:
        sys.exit(1)


def _check_writable(path: Path) -> None:
    """Before minutes of work, not after them."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--json {path}: name a file in a folder that exists")


if __name__ == "__main__":
    run_cli(main)
