"""What came of each run: one JSON line a run in ``results.jsonl``, which is committed with the grid."""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from pretrain.data.files import write_atomically
from pretrain.data.manifest import describe_first_error
from pretrain.errors import UserError

RESULTS_NAME = "results.jsonl"

Status = Literal["finished", "diverged", "failed"]
Curve = list[tuple[int, float | None]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one run.

    Attributes:
        id, stage, variant: as in the grid.
        status: ``finished``; ``diverged`` (see :func:`tools.sweep.curves.judge`); ``failed`` for any other end.
        reason: one line on why it did not finish, None if it did.
        settings: dotted name -> value, all of them, defaults included, but for the run's places.
        steps: completed steps.
        tokens: consumed tokens.
        validation: (step, loss) of every validation, nats per token; None where it was not finite.
        train: (last step, mean loss) of at most 100 equally long stretches; None where a loss was not finite.
        grad_norm_max: largest finite gradient norm before clipping.
        steps_not_finite: steps whose loss or gradient norm was not finite; their updates were skipped.
        seconds: spent in training steps; of a run without a final checkpoint, from its start to its last point.
        machine: processor, and threads of the run.
        versions: of Python and of the packages that decide a result.
        git_revision: of the code when the run started, with ``+changes`` if it was edited.
        data: identity of the samples (see `samples_identity`).
        unigram_entropy: of the validation text under the training frequencies, nats per token.
        tokenizer: see `tokenizer_of`; None where it was not recorded.
        bits_per_byte: of the last validation; None where it was not recorded, or the tokens' bytes are not known.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    id: str
    stage: str
    variant: str
    status: Status
    reason: str | None
    settings: dict[str, Any]
    steps: int
    tokens: int
    validation: Curve
    train: Curve
    grad_norm_max: float | None
    steps_not_finite: int
    seconds: float
    machine: str
    versions: dict[str, str]
    git_revision: str | None
    data: str
    unigram_entropy: float
    tokenizer: str | None = None
    bits_per_byte: float | None = None

    @property
    def final_loss(self) -> float | None:
        """Validation loss after the last step of a finished run, nats per token; None for any other."""
        return self.validation[-1][1] if self.status == "finished" else None


def read_results(folder: Path) -> dict[str, Result]:
    """Results by run id.

    Raises:
        UserError: a line is damaged.
    """
    path = folder / RESULTS_NAME
    if not path.exists():
        return {}
    results = {}
    adapter = TypeAdapter(Result)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            result = adapter.validate_json(line)
        except ValidationError as error:
            raise UserError(
                f"{path}, line {number}: no result ({describe_first_error(error)}); remove the line to run it again"
            ) from None
        results[result.id] = result
    return results


@contextmanager
def results_lock(folder: Path) -> Iterator[None]:
    """One process at a time changes what lies in the results' folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # the folder itself: a lock file would lie among committed files
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def record(folder: Path, result: Result) -> None:
    """Add a result, in the place of an earlier one of the same run; the file is whole at any moment."""
    with results_lock(folder):
        results = read_results(folder)
        results.pop(result.id, None)
        lines = [json.dumps(dataclasses.asdict(each), allow_nan=False) for each in (*results.values(), result)]
        write_atomically(folder / RESULTS_NAME, "".join(f"{line}\n" for line in lines).encode())
