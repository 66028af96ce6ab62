"""What the record of a checkpoint, ``run.json``, must look like: who reads it later need not doubt it."""

import json
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from pretrain.checkpoint.files import FileFacts
from pretrain.data.cursor import Cursor

# Sums of some of them still fit into 64 bits.
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(gt=0, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
RECORD = "run.json"
_ABSENT: Any = None
"""Default of what may be missing, but not null."""


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Exact(_Shape):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Share(_Exact):
    fingerprint: str
    order: str
    samples: Positive
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    max_epochs: Positive | None
    first: Count


class _Stage(_Exact):
    start: Count
    shares: Annotated[list[_Share], Field(min_length=1)]


def _in_order(stages: list[_Stage]) -> list[_Stage]:
    starts = [stage.start for stage in stages]
    if starts != sorted(starts) or starts[:1] not in ([], [0]):
        raise ValueError("the stages are not in order")
    return stages


def _apart(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if any(first + count > following for (first, count), (following, _) in pairwise(windows)):
        raise ValueError("the windows are not in order")
    return windows


class _Data(_Exact):
    stages: Annotated[list[_Stage], AfterValidator(_in_order)]
    skipped: Annotated[list[tuple[Count, Positive]], AfterValidator(_apart)]
    bad_samples: Count
    stream: list[Cursor] = []


class _Validation(_Shape):
    step: Count
    loss: float | None = None


class _Rollback(_Exact):
    at: Count
    to: Count
    first: Count
    count: Positive


class _Signals(_Shape):
    loss: list[Finite]
    grad_norm: list[Finite]


class _Detector(_Shape):
    values: _Signals
    scores: _Signals


class _Layers(_Shape):
    step: Count
    values: dict[str, list[Finite]]


class _Spikes(_Shape):
    rollbacks: list[_Rollback]
    detector: _Detector
    layers: list[_Layers]


class _Callbacks(_Shape):
    __pydantic_extra__: dict[str, dict[str, JsonValue]]
    validation: _Validation = _ABSENT
    spikes: _Spikes = _ABSENT


class _State(_Exact):
    step: Count
    consumed_samples: Count
    tokens: Count
    train_seconds: Finite
    began: Finite = 0.0
    data: _Data
    callbacks: _Callbacks


class _Record(_Shape):
    state: _State
    config: dict[str, JsonValue]
    dp_size: Positive
    data_fingerprint: str
    datasets: dict[str, str]
    tokenizer_sha256: str
    vocab_size: Positive
    adam_step: Count
    files: dict[str, FileFacts]
    versions: dict[str, str] = {}


def require_shape(record: dict[str, Any]) -> None:
    """See that all of a record has the names and types that a run writes.

    Raises:
        ValueError: it has not; one line on the first place.
    """
    try:
        _Record.model_validate_json(json.dumps(record))
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"])
        raise ValueError(f"{RECORD}: {name}: {fault['msg'][0].lower()}{fault['msg'][1:]}") from None
