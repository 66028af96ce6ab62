"""How likely a model finds given tokens: of texts of any length, and of whole samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from pretrain.data.batch import MicroBatch

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Span:
    """Tokens that are read at once, of which the last ones are judged.

    Attributes:
        tokens: at most sequence_length + 1.
        judged: how many of them, from the end; at least one token stands before them.
    """

    tokens: Sequence[int]
    judged: int


@dataclass(frozen=True)
class Likelihood:
    """What a model makes of the judged tokens of a span.

    Attributes:
        log: natural logarithm of their probability, given all before.
        is_greedy: whether each of them is the most likely one.
    """

    log: float
    is_greedy: bool


def windows(tokens: Sequence[int], prefix: int, sequence_length: int) -> list[Span]:
    """Spans that judge every token of a text once, as lm-evaluation-harness divides it.

    The first token is predicted from ``prefix``. Each span judges as many tokens as the model reads; the last one
    begins earlier, so that its tokens, too, have as much before them as there is room for.
    """
    text = [prefix, *tokens]
    starts = range(0, len(tokens), sequence_length)
    ends = [min(start + sequence_length, len(tokens)) for start in starts]
    return [
        Span(text[max(0, end - sequence_length) : end + 1], end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


class Scorer:
    """A whole model on one device, asked for likelihoods in micro batches."""

    def __init__(self, module: nn.Module, vocab_size: int, eod_id: int, micro_batch: int, separate: bool) -> None:
        """Put the model into evaluation mode.

        Args:
            module: of one process.
            vocab_size: logits behind it are padding.
            eod_id: token that ends documents.
            micro_batch: spans or samples at a time.
            separate: whether the model was trained with documents kept apart. Then it is so read too: the first token
                of a text is predicted from the end of a document alone, and what follows does not see that one.
        """
        self._module = module.eval()
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._micro_batch = micro_batch
        self._separate = separate
        self._device = next(module.parameters()).device

    def spans(self, spans: Sequence[Span]) -> list[Likelihood]:
        """The likelihood of each."""
        found: list[Likelihood | None] = [None] * len(spans)
        # Spans of like length share a batch, the longest first: what does not fit into memory does not fit at once.
        order = sorted(range(len(spans)), key=lambda number: -len(spans[number].tokens))
        for numbers in _batches(order, self._micro_batch):
            for number, likelihood in zip(numbers, self._judge([spans[number] for number in numbers]), strict=True):
                found[number] = likelihood
        return [likelihood for likelihood in found if likelihood is not None]

    @torch.no_grad()
    def samples(self, rows: Tensor) -> Tensor:
        """Nats of every token of ``rows``, int64 [samples, sequence + 1], but the first: fp32 [samples, sequence]."""
        losses = []
        for part in torch.split(rows, self._micro_batch):
            tokens, labels = part[:, :-1].contiguous(), part[:, 1:].contiguous()
            losses.append(-self._log_likely(tokens, labels)[0].cpu())
        return torch.cat(losses)

    @torch.no_grad()
    def _judge(self, spans: Sequence[Span]) -> list[Likelihood]:
        length = max(len(span.tokens) for span in spans)
        # What fills a row stands behind its tokens, which do not see it.
        rows = torch.tensor([[*span.tokens, *[self._eod_id] * (length - len(span.tokens))] for span in spans])
        log, is_best = self._log_likely(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        found = []
        for span, logs, best in zip(spans, log.double().cpu(), is_best.cpu(), strict=True):
            judged = slice(len(span.tokens) - 1 - span.judged, len(span.tokens) - 1)
            found.append(Likelihood(float(logs[judged].sum()), bool(best[judged].all())))
        return found

    def _log_likely(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of each label's probability, fp32, and whether it is the largest; both of the labels' shape."""
        batch = MicroBatch(tokens, labels, torch.ones(labels.shape))
        if self._separate:
            batch = batch.with_documents(self._eod_id)
        batch = batch.to(self._device)
        logits = self._module(batch.tokens, batch.position_ids, None, packed_seq_params=batch.documents)
        logits = logits[..., : self._vocab_size].float()
        chosen = logits.gather(-1, batch.labels[..., None])[..., 0]
        return chosen - logits.logsumexp(-1), logits.argmax(-1) == batch.labels


def _batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[first : first + size] for first in range(0, len(items), size))
