"""What a report tells of a spike's step: how the layers stand, and what was in the batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_ext import GeometryProbe
from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.data.batches import Batches
from pretrain.data.tokenizer import Tokenizer
from pretrain.engine import Engine
from pretrain.monitor.layer_norms import gradient_norms
from pretrain.rampup import batch_size
from pretrain.recovery import layers
from pretrain.recovery.reports import LayerChange, Sample
from pretrain.run_data import RunData
from pretrain.state import TrainState

EXCERPT_TOKENS = 64
SAMPLES = 8


class Describer:
    """Looks at the step that was just computed, at the cost of another forward pass."""

    def __init__(
        self, config: Config, engine: Engine, data: RunData, batches: Batches, group: dist.ProcessGroup
    ) -> None:
        """Begin; ``group`` of all ranks, on the CPU."""
        self._config, self._engine, self._batches, self._group = config, engine, batches, group
        self._probe = GeometryProbe(engine.module)
        self._tokenizer = data.tokenizer

    def describe(
        self, state: TrainState, micro_batches: Sequence[MicroBatch], history: list[dict[str, Any]]
    ) -> tuple[list[LayerChange], list[Sample]]:
        """Layers that moved and samples of the step that follows ``state``, its gradients still there; collective.

        Ranks other than 0 get no samples.
        """
        gradients = gradient_norms(self._engine, self._config.model.num_layers)
        with self._probe.recording():
            losses = self._engine.losses(micro_batches)
        now = layers.measurement(state.step + 1, gradients, self._probe.reduce(dist.group.WORLD))
        return layers.changes(history, now), self._samples(state, micro_batches, losses)

    def _samples(self, state: TrainState, micro_batches: Sequence[MicroBatch], losses: list[float]) -> list[Sample]:
        """Those of the worst micro batches of all data-parallel ranks, on global rank 0."""
        place = self._engine.place
        begins = [micro.tokens[:, :EXCERPT_TOKENS].tolist() for micro in micro_batches] if place.pp_rank == 0 else []
        own = (place.dp_rank, begins, losses) if place.tp_rank == 0 else (place.dp_rank, [], [])
        found: list[Any] = [None] * place.world_size if place.global_rank == 0 else []
        dist.gather_object(own, found or None, dst=0, group=self._group)
        texts, loss_of = dict[tuple[int, int], list[list[int]]](), dict[tuple[int, int], float]()
        for dp_rank, begun, lost in found:
            texts |= {(dp_rank, number): rows for number, rows in enumerate(begun)}
            loss_of |= {(dp_rank, number): loss for number, loss in enumerate(lost)}
        worst = sorted(texts, key=lambda one: -np.nan_to_num(loss_of.get(one, 0.0), nan=np.inf, posinf=np.inf))
        tokenizer = self._tokenizer() if worst else None
        samples: list[Sample] = []
        for dp_rank, number in worst[:SAMPLES]:
            loss = loss_of.get((dp_rank, number))
            samples += self._of_micro_batch(
                state,
                (dp_rank, number),
                texts[dp_rank, number],
                loss if loss and np.isfinite(loss) else None,
                tokenizer,
            )
        return samples[:SAMPLES]

    def _of_micro_batch(
        self,
        state: TrainState,
        where: tuple[int, int],
        begins: list[list[int]],
        loss: float | None,
        tokenizer: Tokenizer | None,
    ) -> list[Sample]:
        dp_rank, number = where
        batch = batch_size(state.consumed_samples, self._config.train)
        first = dp_rank * (batch // self._engine.place.dp_size) + number * self._config.train.micro_batch
        draws = state.data.draws(state.consumed_samples, batch)[first : first + len(begins)]
        places = self._batches.locate(draws)
        return [
            Sample(
                draw=int(draw),
                dataset=places[index][0] if places else None,
                sample=places[index][1] if places else None,
                loss=loss,
                excerpt=excerpt(tokens, tokenizer),
            )
            for index, (draw, tokens) in enumerate(zip(draws, begins, strict=True))
        ]


def excerpt(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    """Tokens as one line of text, or as their numbers."""
    if tokenizer is None:
        return " ".join(map(str, tokens))
    text = tokenizer.decode(np.array(tokens))
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
