"""Our finished runs as rows of the papers' tables."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint import store
from pretrain.data.manifest import NO_TOKENIZER, load_manifest
from pretrain.errors import UserError
from pretrain.inspect_checkpoint import find_checkpoint, recorded_config
from pretrain.rampup import samples_of
from tools.paper.targets import TOKENIZERS, Target
from tools.sweep.curves import read_curves
from tools.sweep.data import existing_data, tokenizer_of
from tools.sweep.grid import PLACES, Grid, flat, load_grid
from tools.sweep.plan import Planned, State, all_settings, plan
from tools.sweep.results import read_results


@dataclass(frozen=True)
class Finished:
    """A run that a figure is taken from.

    Attributes:
        loss: validation loss at its end, nats per token.
        bits_per_byte: None where the bytes of its tokens are not known.
        tokenizer: as :func:`tools.sweep.data.tokenizer_of` tells it; None where that is not known.
        note: what sets it apart from the run of the sweep; may be empty.
    """

    loss: float
    bits_per_byte: float | None
    tokenizer: str | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        label: variant, and what else the stage varies.
        theirs: the paper's figure; None where we know none.
        ours: in the same measure; None where nothing ran to its end.
        spread: sample standard deviation over seeds; None with fewer than two.
        bits_per_byte: mean; None where one is not known.
        tokens: of each run, as planned.
        remarks: what keeps the two from being compared, or what became of runs that did not finish.
    """

    label: str
    theirs: float | None
    ours: float | None
    spread: float | None
    bits_per_byte: float | None
    tokens: int
    remarks: Sequence[str]


def rows_of(target: Target, folder: Path, given: Mapping[str, Path]) -> list[Row]:
    """A row for each variant and column of the target's stage.

    Args:
        target: the table.
        folder: of the targets' file.
        given: ``grid/run id`` -> folder of a run that was started without the sweep.

    Raises:
        UserError: the sweep, or a given run, cannot be used.
    """
    grid = load_grid(folder / target.grid)
    if target.stage not in grid.file.stages:
        raise UserError(f"{target.title}: {grid.path} has no stage {target.stage}")
    planned = plan(grid, read_results(grid.results_folder), existing_data(grid))
    members = [each for each in planned if each.run.stage == target.stage]
    labels = {each.run.id: ", ".join(filter(None, (each.run.variant, each.run.column))) for each in members}
    if unknown := set(target.theirs) - set(labels.values()):
        raise UserError(f"{target.title}: theirs: {min(unknown)} is no row of stage {target.stage} of {grid.path}")
    rows = []
    for label in dict.fromkeys(labels.values()):
        of_row = [each for each in members if labels[each.run.id] == label]
        rows.append(_row(target, grid, label, of_row, given))
    return rows


def _row(target: Target, grid: Grid, label: str, members: Sequence[Planned], given: Mapping[str, Path]) -> Row:
    found: list[Finished] = []
    remarks: list[str] = []
    for each in members:
        place = given.get(f"{grid.path.stem}/{each.run.id}")
        if place is not None:
            found.append(_started_alone(grid, each, place))
        elif each.state == State.FINISHED and each.result and each.result.final_loss is not None:
            result = each.result
            found.append(Finished(each.result.final_loss, result.bits_per_byte, result.tokenizer))
        elif each.result is not None:
            remarks.append(f"{each.state}: {each.detail}")
    values = [_measured(target, run.loss) for run in found]
    bits = [run.bits_per_byte for run in found if run.bits_per_byte is not None]
    remarks += dict.fromkeys(run.note for run in found if run.note)
    remarks += dict.fromkeys(_tokenizer_remark(target, run.tokenizer) for run in found)
    config = grid.config(members[0].run, members[0].taken or grid.first_candidates(members[0].run))
    return Row(
        label=label,
        theirs=target.theirs.get(label),
        ours=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        bits_per_byte=statistics.fmean(bits) if bits and len(bits) == len(found) else None,
        tokens=samples_of(config.train.steps, config.train) * config.model.sequence_length,
        remarks=[remark for remark in remarks if remark],
    )


def _measured(target: Target, loss: float) -> float:
    return math.exp(loss) if target.measure == "perplexity" else loss


def _tokenizer_remark(target: Target, ours: str | None) -> str:
    if target.tokenizer is None:
        return "tokenizer: theirs is not stated"
    return "" if ours == TOKENIZERS[target.tokenizer] else "other tokenizer"


def _started_alone(grid: Grid, planned: Planned, run: Path) -> Finished:
    """A run by its newest checkpoint and its curves.

    Raises:
        UserError: it is not at the end of its steps, or never validated.
    """
    checkpoint = find_checkpoint(run)
    record = store.read_record(checkpoint)
    config = recorded_config(checkpoint, record)
    state = record["state"]
    measured = state["callbacks"].get("validation", {})
    if state["step"] != config.train.steps or measured.get("step") != state["step"] or "loss" not in measured:
        raise UserError(f"{run}: step {state['step']} of {config.train.steps} has no final validation loss")
    bits = read_curves(checkpoint.parent.parent).bits_per_byte.get(state["step"])
    return Finished(measured["loss"], bits, _recorded_tokenizer(record), _differences(grid, planned, record))


def _recorded_tokenizer(record: Mapping[str, Any]) -> str | None:
    """A record does not say which token ends documents; the data's manifest does, if it still lies there."""
    if record["tokenizer_sha256"] != NO_TOKENIZER:
        return str(record["tokenizer_sha256"])
    place = record["config"]["data"].get("manifest")
    if place is None or not Path(place).exists():
        return None
    manifest = load_manifest(place)
    return tokenizer_of(manifest) if manifest.fingerprint in record["datasets"].values() else None


def _differences(grid: Grid, planned: Planned, record: Mapping[str, Any]) -> str:
    wanted = all_settings(grid, planned.run, planned.taken or grid.first_candidates(planned.run))
    had = {name: value for name, value in flat(record["config"]).items() if name not in PLACES}
    names = _that_matter(name for name in wanted if name in had and wanted[name] != had[name])
    return f"other settings: {', '.join(names)}" if names else ""


def _that_matter(names: Iterable[str]) -> list[str]:
    """Settings that can change a loss."""
    sections = ("model.", "train.", "optimizer.", "data.separate_documents", "validation.samples")
    return [
        name for name in names if name.startswith(sections) and name not in ("train.micro_batch", "model.recompute")
    ]
