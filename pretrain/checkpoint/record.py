"""What the record of a checkpoint, ``run.json``, must look like: who reads it later need not doubt it."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from pretrain.checkpoint.files import FileFacts
from pretrain.data.progress import DataProgress

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
RECORD = "run.json"


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Validation(_Shape):
    step: Count
    loss: float | None = None


class _Rollback(_Shape):
    model_config = ConfigDict(extra="forbid", strict=True)
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
    validation: _Validation | None = None
    spikes: _Spikes | None = None


class _State(_Shape):
    model_config = ConfigDict(extra="forbid", strict=True)
    step: Count
    consumed_samples: Count
    tokens: Count
    train_seconds: float
    began: float = 0.0
    data: DataProgress
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
