"""Reports of spikes, a JSON file each in ``RUN/spikes``; those of rollbacks are also how a restart knows of them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pretrain.checkpoint.files import force_to_disk
from pretrain.errors import UserError
from pretrain.recovery.memory import Rollback

FOLDER = "spikes"


@dataclass(frozen=True)
class Signal:
    """One of the detector's signals at a spike; None for what is not finite or not known."""

    value: float | None
    median: float | None
    score: float | None


@dataclass(frozen=True)
class LayerChange:
    """How one quantity of a layer, or of the embedding or head, stood at a spike against its last measurements.

    Attributes:
        since: earliest of the measured steps from which it stayed high; None where it is not high at all.
        score: spreads above the median of the measurements before; None with too few of them.
    """

    part: str
    quantity: str
    value: float | None
    median: float | None
    score: float | None
    since: int | None


@dataclass(frozen=True)
class Sample:
    """One sample of the batch.

    Attributes:
        draw: its global draw; in data.mode=stream its number.
        dataset, sample: where it is stored; None in data.mode=stream.
        loss: of its micro batch, nats per token.
        excerpt: its beginning, decoded where the tokenizer is known.
    """

    draw: int
    dataset: str | None
    sample: int | None
    loss: float | None
    excerpt: str


@dataclass(frozen=True)
class Report:
    """All that is told of a spike.

    Attributes:
        step, onset: 1-based steps: where it was seen, and where it began.
        signals: of the detector, by name.
        lr: learning rate of the step.
        done: in words.
        rollback: if there was one.
        layers: those that moved most, the first ones first.
        samples: of the batch, those of the worst micro batches first.
    """

    step: int
    onset: int
    signals: Mapping[str, Signal]
    lr: float
    done: str
    rollback: Rollback | None = None
    layers: list[LayerChange] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def line(self) -> str:
        """One line for the console."""
        signals = ", ".join(
            f"{name} {_number(one.value)} ({_number(one.score)} spreads above {_number(one.median)})"
            for name, one in self.signals.items()
        )
        return f"spike at step {self.step}: {signals}; {self.done}"

    def markdown(self) -> str:
        """The whole report as a page."""
        lines = [f"**{self.line()}**", "", f"It began at step {self.onset}; learning rate {self.lr:.4g}.", ""]
        if self.layers:
            lines += [
                "| layer | quantity | value | median before | spreads | high since step |",
                "|---|---|---|---|---|---|",
            ]
            for one in self.layers:
                numbers = " | ".join(_number(value) for value in (one.value, one.median, one.score))
                since = "-" if one.since is None else str(one.since)
                lines.append(f"| {one.part} | {one.quantity} | {numbers} | {since} |")
            lines.append("")
        if self.samples:
            lines += ["| draw | data set | sample | loss | begins |", "|---|---|---|---|---|"]
            for sample in self.samples:
                where = f"{sample.dataset or '-'} | {'-' if sample.sample is None else sample.sample}"
                excerpt = sample.excerpt.replace("|", "\\|").replace("`", "'")
                lines.append(f"| {sample.draw} | {where} | {_number(sample.loss)} | `{excerpt}` |")
        return "\n".join(lines)


_REPORT = TypeAdapter(Report)


def write(run: Path, report: Report, number: int | None = None) -> Path:
    """Put a report into the run's folder, durably; ``number`` is that of a rollback, counted from 1.

    A step that is seen again after a restart gets its report anew.

    Raises:
        OSError: it cannot be written.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    name = f"step-{report.step:08d}"
    final = folder / (f"{name}.json" if number is None else f"rollback-{number:04d}-{name}.json")
    partial = final.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(report), file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(final)
    force_to_disk(folder)
    return final


def read_all(run: Path) -> list[Report]:
    """The run's reports, rollbacks first and in their order.

    Raises:
        UserError: one is damaged.
    """
    return [_read(path) for path in sorted((run / FOLDER).glob("*.json"))]


def recorded_rollbacks(run: Path) -> list[Rollback]:
    """The run's rollbacks in order; UserError when a report is damaged."""
    return [report.rollback for report in read_all(run) if report.rollback is not None]


def set_aside(run: Path) -> None:
    """At a fresh start: reports of a run that was here before are none of this one's."""
    folder = run / FOLDER
    if not folder.exists():
        return
    number = 1
    while (kept := folder.with_name(f"{FOLDER}.before-{number}")).exists():
        number += 1
    folder.rename(kept)


def _read(path: Path) -> Report:
    try:
        return _REPORT.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        reason = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    except OSError as error:
        reason = str(error)
    raise UserError(f"{path} is no report of a spike: {reason}; remove it to forget that spike")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
