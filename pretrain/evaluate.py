"""Validation loss during a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pretrain.config import Config
from pretrain.data.batch import MicroBatch
from pretrain.data.text_bytes import TextBytes, bits_per_nat
from pretrain.engine import Engine
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.rampup import batch_sizes
from pretrain.resilience.pulse import Pulse
from pretrain.resilience.wishes import Stop
from pretrain.schedule import is_due
from pretrain.state import TrainState

_NAME = "validation"
"""What a run remembers of it: the newest step whose validation loss is known."""


@dataclass(frozen=True)
class HeldOut:
    """This rank's part of a data set's validation samples.

    Attributes:
        name: of the data set.
        weight: of the data set in the mixture.
        micro_batches: as many as every other data-parallel rank has.
        text_bytes: of the data set's tokens; None where they came without a tokenizer that tells.
    """

    name: str
    weight: float
    micro_batches: Sequence[MicroBatch]
    text_bytes: TextBytes | None = None


class Validation:
    """The loss over the same held-out samples every ``validation.every`` steps, at the end, and when wished for.

    With several data sets each has a curve of its own, beside the mean by their weights. Beside every loss stand the
    bits per byte of the text that the very same tokens decode to, where their tokenizer is known.
    """

    def __init__(self, config: Config, engine: Engine, board: Board, pulse: Pulse, held_out: Sequence[HeldOut]) -> None:
        self._every = config.validation.every
        self._steps = config.train.steps
        self._engine = engine
        self._board = board
        self._pulse = pulse
        self._held_out = held_out
        self._bits_per_nat = [_bits_per_nat(part, engine.place.device) for part in held_out]
        # No part takes longer than a step, by which the watchdog judges.
        self._part = batch_sizes(config.train)[0] // (config.train.micro_batch * engine.place.dp_size)

    def make_up(self, state: TrainState) -> None:
        """Evaluate if the run stopped before it could, at the step that it goes on from."""
        known = state.callbacks.setdefault(_NAME, {"step": state.step})
        if known["step"] < state.step and is_due(state.step, self._every, self._steps):
            self._evaluate(state)

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Evaluate when it is time."""
        if result.wishes.evaluate or is_due(state.step, self._every, self._steps):
            self._evaluate(state)

    def _evaluate(self, state: TrainState) -> None:
        """Leaves when the run is told to stop; at the last step it stops anyway."""
        last = state.step == self._steps
        losses = []
        for part in self._held_out:
            cut = list(_parts(part.micro_batches, self._part))
            loss = self._engine.evaluate_unless(cut, lambda: self._pulse.poll().stop != Stop.NO and not last)
            if loss is None:
                return
            losses.append(loss)
        self._write(state, losses)

    def _write(self, state: TrainState, losses: Sequence[float]) -> None:
        mean = self._mean(losses)
        state.callbacks[_NAME] = {"step": state.step, "loss": mean}
        said = self._curves("", mean, self._mean_bits(losses), state.step)
        self._board.scalars_by_tokens({"validation/loss_by_tokens": mean}, state.tokens, state.clock)
        if len(losses) > 1:
            for part, loss, factor in zip(self._held_out, losses, self._bits_per_nat, strict=True):
                bits = None if factor is None else loss * factor
                said += f"  {part.name} {self._curves(f'/{part.name}', loss, bits, state.step)}"
        self._board.flush()  # a run that resumes from a checkpoint of this step does not repeat the point
        if self._engine.place.global_rank == 0:
            print(f"step {state.step}/{self._steps}  validation loss {said}", flush=True)

    def _curves(self, name: str, loss: float, bits: float | None, step: int) -> str:
        """Write a point of each curve; what there is to print of them."""
        self._board.scalar(f"validation/loss{name}", loss, step)
        if bits is None:
            return f"{loss:.4f}"
        self._board.scalar(f"validation/bits_per_byte{name}", bits, step)
        return f"{loss:.4f} ({bits:.4f} bits per byte)"

    def _mean(self, values: Sequence[float]) -> float:
        weights = [part.weight for part in self._held_out]
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)

    def _mean_bits(self, losses: Sequence[float]) -> float | None:
        """By the weights of the data sets, as the loss; None where one of them has none."""
        bits = [loss * factor for loss, factor in zip(losses, self._bits_per_nat, strict=True) if factor is not None]
        return self._mean(bits) if len(bits) == len(losses) else None


def _bits_per_nat(part: HeldOut, device: torch.device) -> float | None:
    """Over all data-parallel ranks, for the tokens that are not masked; collective."""
    if part.text_bytes is None:
        return None
    tokens = text_bytes = 0
    for batch in part.micro_batches:
        counted = batch.loss_mask.cpu().numpy() > 0
        found = part.text_bytes.count(batch.tokens.numpy(), batch.labels.numpy())
        tokens, text_bytes = tokens + int(counted.sum()), text_bytes + int(found[counted].sum())
    both = torch.tensor([tokens, text_bytes], device=device)
    dist.all_reduce(both, group=parallel_state.get_data_parallel_group())
    return bits_per_nat(*both.tolist())


def _parts(micro_batches: Sequence[MicroBatch], size: int) -> Iterator[Sequence[MicroBatch]]:
    return (micro_batches[first : first + size] for first in range(0, len(micro_batches), size))
