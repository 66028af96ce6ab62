"""What ``tools/demo.sh`` needs of Python: a check of the settings before it starts, and the table at its end."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.data.manifest import load_manifest
from pretrain.errors import UserError, run_cli

# A model that knows nothing but the tokens' frequencies reaches the unigram entropy; this share of it is clearly below.
CLEARLY_BELOW = 0.95
NOTE = "One seed, one untuned learning rate, a few minutes: the path works, and no more can be read from the losses."


@dataclass(frozen=True)
class Outcome:
    """The last losses of a run, in nats per token."""

    run: Path
    step: int
    train_loss: float
    validation_loss: float


def read_outcome(run: Path) -> Outcome:
    """The last points of train/loss and validation/loss in the run's TensorBoard files.

    Raises:
        UserError: a curve is missing.
    """
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    last = {}
    for tag in ("train/loss", "validation/loss"):
        if tag not in events.Tags()["scalars"]:
            raise UserError(f"{run}/tensorboard has no curve {tag}; set validation.every above 0 and run again")
        last[tag] = events.Scalars(tag)[-1]
    train, validation = last["train/loss"], last["validation/loss"]
    return Outcome(run, train.step, train.value, validation.value)


def table(outcomes: list[Outcome], unigram_entropy: float) -> str:
    """The runs' losses beside the unigram entropy of the validation text, in nats per token."""
    head = f"{'run':<24}{'steps':>7}{'training':>11}{'validation':>12}{'unigram entropy':>17}   (loss, nats per token)"
    rows = [
        f"{outcome.run.as_posix():<24}{outcome.step:>7}{outcome.train_loss:>11.4f}{outcome.validation_loss:>12.4f}"
        f"{unigram_entropy:>17.4f}"
        for outcome in outcomes
    ]
    return "\n".join([head, *rows, NOTE])


def print_table(manifest: Path, runs: list[Path]) -> None:
    """Print the table; exit with status 1 when a run is not clearly better than the tokens' frequencies."""
    entropy = load_manifest(manifest).split("validation").unigram_entropy
    outcomes = [read_outcome(run) for run in runs]
    print("\n" + table(outcomes, entropy), flush=True)
    weak = [outcome.run.as_posix() for outcome in outcomes if not outcome.validation_loss < CLEARLY_BELOW * entropy]
    if weak:
        print(
            f"not clearly below the unigram entropy (under {CLEARLY_BELOW * entropy:.4f}): {', '.join(weak)}; "
            f"more steps or more text may help",
            file=sys.stderr,
        )
        sys.exit(1)


def check(config_file: Path, settings: list[str], processes: int) -> None:
    """Raise UserError for settings that the runs would refuse, before the data is there."""
    # Imported late: they load torch and Megatron-core, which the table can do without.
    from pretrain.config_file import load_config
    from pretrain.rules import check_config, check_layout

    config = load_config(config_file, settings)
    check_config(config)
    check_layout(config, processes)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="check settings")
    checking.add_argument("config", type=Path)
    checking.add_argument("settings", nargs="*", metavar="section.key=value")
    checking.add_argument("--processes", type=int, required=True)
    reporting = commands.add_parser("table", help="compare finished runs")
    reporting.add_argument("--manifest", type=Path, required=True)
    reporting.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options = parser.parse_args()
    if options.command == "check":
        check(options.config, options.settings, options.processes)
    else:
        print_table(options.manifest, options.runs)


if __name__ == "__main__":
    run_cli(main)
