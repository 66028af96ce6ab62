"""A checkpoint as a model of lm-evaluation-harness, with our tokenizer and our own forward pass."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.scoring import Scorer, Span, windows


class CheckpointModel(TemplateLM):  # type: ignore[misc]
    """What the harness asks of a model: likelihoods. It does not generate text."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, sequence_length: int) -> None:
        super().__init__()
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length

    @property
    def eot_token_id(self) -> int:
        """The end of a document, which also stands in front of a text without a context."""
        return self._tokenizer.eod_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Tokens of a text, without an end of document."""
        tokens: list[int] = self._tokenizer.encode_documents([string])[0][:-1].tolist()
        return tokens

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in nats."""
        divided = [
            windows(self.tok_encode(request.args[0]), self.eot_token_id, self._sequence_length) for request in requests
        ]
        found = iter(self._scorer.spans([span for spans in divided for span in spans]))
        return [sum(next(found).log for _ in spans) for spans in divided]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Refused; :func:`pretrain.harness.tasks.load_tasks` does so before the model is loaded."""
        raise UserError("tasks that generate text are not offered here")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        spans = []
        for (_, text), context, continuation in requests:
            if len(continuation) > self._sequence_length:
                raise UserError(
                    f"an answer of {len(continuation)} tokens is longer than the model's sequence of "
                    f"{self._sequence_length}: {text[:60]!r}"
                )
            # The context is cut from the left to what fits.
            spans.append(Span((context + continuation)[-self._sequence_length - 1 :], len(continuation)))
        return [(likelihood.log, likelihood.is_greedy) for likelihood in self._scorer.spans(spans)]
