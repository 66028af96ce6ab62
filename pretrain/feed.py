"""The samples of each step: read ahead, and masked alike on all ranks that work on them."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pretrain.config import Config
from pretrain.data.ahead import ReadAhead
from pretrain.data.batch import MicroBatch, micro_batches
from pretrain.data.batches import Batches
from pretrain.data.reader import Rows
from pretrain.errors import SharedError
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.rampup import batch_size
from pretrain.schedule import is_log_step
from pretrain.state import TrainState
from pretrain.together import Together, do_together


def needs_tokens(config: Config, place: Place) -> bool:
    """Whether this rank reads samples: the first pipeline stage embeds tokens, the last one compares labels.

    Those between them do so only to tell documents apart.
    """
    return place.pp_rank in (0, config.parallel.pp - 1) or config.data.separate_documents


def agree(rows: Rows, place: Place) -> torch.Tensor:
    """Which samples all ranks of this data-parallel rank have read well: bool ``[n]`` on the device; collective.

    One of them may fail to read what the others could, and the count of unmasked tokens must be the same for all.
    """
    sound = torch.from_numpy(rows.sound)
    if place.world_size == place.dp_size:
        return sound
    agreed = sound.to(place.device, torch.int32)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=parallel_state.get_model_parallel_group())
    if place.cp_size > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=parallel_state.get_context_parallel_group())
    return agreed.bool()


class Feed:
    """What the training loop eats. As a callback it keeps count of bad samples, and stops the run at too many."""

    def __init__(
        self,
        config: Config,
        batches: Batches,
        ahead: ReadAhead,
        board: Board,
        place: Place,
        together: Together | None,
    ) -> None:
        """Feed ``batches``, read by ``ahead``, to this rank; ``together`` where reading may fail on one rank alone."""
        self._together = together
        self._batches = batches
        self._ahead = ahead
        self._board = board
        self._place = place
        self._steps = config.train.steps
        self._config = config
        self._limit = config.data.max_bad_samples
        self._bad = torch.zeros((), dtype=torch.int64, device=place.device)

    def fetch(self, state: TrainState) -> list[MicroBatch]:
        """This rank's micro batches of the step that follows ``state``; collective.

        Raises:
            UserError: a remote shard cannot be had; SharedError where there are several ranks.
        """
        train = self._config.train
        size = batch_size(state.consumed_samples, train)
        behind = state.consumed_samples + size
        draws = state.data.draws(state.consumed_samples, size)
        last = state.step + 1 >= self._steps
        following = None if last else state.data.draws(behind, batch_size(behind, train))
        rows = do_together(self._together, lambda: self._ahead.take(draws, following))
        sound = agree(rows, self._place)
        self._bad += (~sound).sum().to(self._place.device)
        return micro_batches(torch.from_numpy(rows.tokens), sound, self._batches.micro_batch)

    def start(self) -> None:
        """Go on elsewhere: what was read since the last log step does not count."""
        self._bad.zero_()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """On log steps, and before anything wished for, add up the bad samples of all ranks.

        Raises:
            SharedError: there are more than ``data.max_bad_samples`` allows.
        """
        if not (is_log_step(state.step, self._config) or result.wishes.any):
            return
        dist.all_reduce(self._bad, group=parallel_state.get_data_parallel_group())
        state.data.bad_samples += int(self._bad)
        self._bad.zero_()
        bad = state.data.bad_samples
        if bad:
            self._board.scalar("data/bad_samples", bad, state.step)
        if bad > self._limit * max(1.0, state.consumed_samples / 1e6):
            raise SharedError(
                f"{bad} of {state.consumed_samples} samples were damaged, more than data.max_bad_samples={self._limit} "
                f"in a million; python -m tools.shards verify MANIFEST finds the files to restore"
            )
