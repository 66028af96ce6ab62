"""The results as Markdown: a table a stage, a row a variant, a column for each combination of what the stage varies."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from pretrain.rampup import samples_of
from tools.sweep.grid import Grid, Run
from tools.sweep.plan import Planned, State
from tools.sweep.results import Result

_SHOWN_PACKAGES = ("python", "torch", "megatron-core", "deepspeed")


def table_text(grid: Grid, planned: Sequence[Planned]) -> str:
    """The whole report."""
    parts = [f"# {grid.file.title}", grid.file.note.strip(), _legend(grid), _facts(planned)]
    parts += [_stage_text(grid, stage, planned) for stage in grid.file.stages]
    parts.append(_unfinished(planned))
    return "\n\n".join(part for part in parts if part) + "\n"


def mean_and_spread(losses: Sequence[float]) -> str:
    """Mean, sample standard deviation (of two and more) and number of values."""
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{spread} ({len(losses)})"


def final_losses(planned: Iterable[Planned]) -> list[float]:
    """Final validation losses of the finished ones."""
    losses = [each.result.final_loss for each in planned if each.state == State.FINISHED and each.result]
    return [loss for loss in losses if loss is not None]


def mean_loss(planned: Iterable[Planned]) -> float:
    """Mean final validation loss of the finished ones; infinity without any."""
    losses = final_losses(planned)
    return statistics.fmean(losses) if losses else math.inf


def best_column(of_variant: Sequence[Planned]) -> list[Planned]:
    """A variant's runs of the lowest mean final loss; those of its first column where none finished."""
    columns = columns_of(each.run for each in of_variant)
    return min(([each for each in of_variant if each.run.column == column] for column in columns), key=mean_loss)


def columns_of(runs: Iterable[Run]) -> list[str]:
    """The columns of a stage, in the grid's order."""
    return list(dict.fromkeys(run.column for run in runs))


def _legend(grid: Grid) -> str:
    return (
        "Each cell: final validation loss in nats per token, mean ± sample standard deviation over seeds (number of "
        "finished runs); a row's lowest mean is bold; an empty cell has no result yet. A run has diverged when the "
        "trainer stopped because loss or gradient norm was not finite, or when its final validation loss is not finite "
        f"or more than {grid.file.diverged_above_unigram} above the unigram entropy of the validation text; diverged "
        "runs are counted, and are in no mean. Curves: curves.png; every run: results.jsonl."
    )


def _facts(planned: Sequence[Planned]) -> str:
    counted = [each.result for each in planned if each.counts and each.result]
    states = Counter(each.state for each in planned)
    lines = [f"- runs: {len(planned)}; " + ", ".join(f"{count} {state}" for state, count in states.items())]
    if states[State.CHANGED]:
        lines.append("- changed: recorded with other settings or data than the grid has now, so left out below")
    facts = {
        "machine": [result.machine for result in counted],
        "data": [
            f"{result.data[:12]}, unigram entropy of the validation text {result.unigram_entropy:.4f} nats per token"
            for result in counted
        ],
        "versions": [_versions(result) for result in counted],
        "code": [(result.git_revision or "unknown")[:10] + _changes(result) for result in counted],
    }
    lines += [f"- {name}: {'; '.join(dict.fromkeys(values))}" for name, values in facts.items() if values]
    return "\n".join(lines)


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {result.versions[name]}" for name in _SHOWN_PACKAGES if name in result.versions)


def _changes(result: Result) -> str:
    return "+changes" if (result.git_revision or "").endswith("+changes") else ""


def _stage_text(grid: Grid, stage: str, planned: Sequence[Planned]) -> str:
    members = [each for each in planned if each.run.stage == stage]
    columns = columns_of(each.run for each in members)
    taken = list(grid.file.stages[stage].take)
    head = ["", *(column or "validation loss" for column in columns), *taken]
    head += ["runs", "diverged", "failed", "largest gradient norm", "steps not finite", "ms a step"]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for variant in dict.fromkeys(each.run.variant for each in members):
        of_variant = [each for each in members if each.run.variant == variant]
        cells = _cells([[each for each in of_variant if each.run.column == column] for column in columns])
        values = [
            ", ".join(dict.fromkeys(str(each.taken[name]) for each in of_variant if each.taken)) for name in taken
        ]
        rows.append([variant, *cells, *values, *_row_facts(of_variant)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"## {stage}: {_length(grid, members)}", "", *lines])


def _length(grid: Grid, members: Sequence[Planned]) -> str:
    """Steps and tokens of the stage's runs, which a taken setting does not change."""
    texts = []
    for each in members:
        settings = grid.config(each.run, each.taken or grid.first_candidates(each.run))
        steps, tokens = settings.train.steps, settings.train.global_batch * settings.model.sequence_length
        whole = samples_of(steps, settings.train) * settings.model.sequence_length
        texts.append(f"{steps:,} steps of {tokens:,} tokens, {whole / 1e6:.2f} M tokens a run")
    return "; ".join(dict.fromkeys(texts))


def _cells(groups: Sequence[Sequence[Planned]]) -> list[str]:
    means = [statistics.fmean(losses) if (losses := final_losses(group)) else float("inf") for group in groups]
    lowest = min(means) if len(groups) > 1 else None
    return [
        _cell(group, bold=mean == lowest and mean < float("inf")) for group, mean in zip(groups, means, strict=True)
    ]


def _cell(group: Sequence[Planned], bold: bool) -> str:
    losses = final_losses(group)
    texts = []
    if losses:
        texts.append(f"**{mean_and_spread(losses)}**" if bold else mean_and_spread(losses))
    for state in (State.DIVERGED, State.FAILED):
        if count := sum(each.state == state for each in group):
            texts.append(f"{count} {state}")
    return ", ".join(texts)


def _row_facts(members: Sequence[Planned]) -> list[str]:
    """Number of results, diverged, failed, largest gradient norm, steps that were not finite, milliseconds a step."""
    counted = [each.result for each in members if each.counts and each.result]
    norms = [result.grad_norm_max for result in counted if result.grad_norm_max is not None]
    speeds = [
        1000 * each.result.seconds / each.result.steps
        for each in members
        if each.state == State.FINISHED and each.result
    ]
    return [
        f"{len(counted)} of {len(members)}",
        str(sum(each.state == State.DIVERGED for each in members)),
        str(sum(each.state == State.FAILED for each in members)),
        f"{max(norms):.2f}" if norms else "",
        str(sum(result.steps_not_finite for result in counted)) if counted else "",
        f"{statistics.fmean(speeds):.0f}" if speeds else "",
    ]


def _unfinished(planned: Sequence[Planned]) -> str:
    shown = (State.DIVERGED, State.FAILED, State.CHANGED, State.BLOCKED)
    lines = [f"- {each.run.id}: {each.state}: {each.detail}" for each in planned if each.state in shown]
    return "\n".join(["## Runs that did not finish or do not count", "", *lines]) if lines else ""
