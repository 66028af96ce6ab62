"""``configs/paper/targets.yaml``: what the papers report, and of which runs."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pretrain.data.manifest import describe_first_error
from pretrain.errors import UserError
from tools.sharding.nanogpt import GPT2

TOKENIZERS = {"gpt2": f"{GPT2.sha256}, {GPT2.vocab_size} tokens, {GPT2.eod_id} ends"}
"""As :func:`tools.sweep.data.tokenizer_of` tells them."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Section):
    """A table of a paper.

    Attributes:
        title: heading.
        grid: sweep whose runs it is of, relative to the targets' file.
        stage: of that sweep.
        measure: validation loss in nats per token, or perplexity, its exponential.
        tokenizer: the paper's, None where it does not say.
        theirs: variant, or ``variant, column``, -> the paper's figure.
        said: what else the paper says of these runs.
    """

    title: str
    grid: Path
    stage: str
    measure: Literal["loss", "perplexity"]
    tokenizer: Literal["gpt2"] | None
    theirs: dict[str, float] = {}
    said: str


class _Targets(_Section):
    tables: tuple[Target, ...] = Field(min_length=1)


def load_targets(path: Path) -> tuple[Target, ...]:
    """Read the file.

    Raises:
        UserError: in one line, for whatever is wrong with it.
    """
    try:
        return _Targets.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).tables
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"{path}: {describe_first_error(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
