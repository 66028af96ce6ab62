"""Data as tars of raw text, tokenised as they are read (``data.mode=stream``)."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pretrain.config import Config
from pretrain.data.batch import micro_batches
from pretrain.data.cursor import Cursor
from pretrain.data.manifest import canonical_json
from pretrain.data.places import expand_places, relative_names
from pretrain.data.shard_bytes import Opener, require_local_shards
from pretrain.data.stream import TextShards
from pretrain.data.stream_batches import StreamBatches, read_held_out
from pretrain.data.text_bytes import TextBytes
from pretrain.data.tokenizer import Tokenizer
from pretrain.datasets import Facts, access
from pretrain.errors import SharedError, UserError
from pretrain.evaluate import HeldOut
from pretrain.feed import agree
from pretrain.loop import Callback
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.schedule import is_due
from pretrain.state import TrainState
from pretrain.together import Together, do_together

NAME = "stream"


class StreamedData:
    """See :class:`pretrain.run_data.RunData`."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer and see that local shards are there; UserError when they are not."""
        data = config.data
        assert data.tokenizer is not None, "a rule sees to it"
        self._places = expand_places(data.urls, "data.urls")
        self._held_out = expand_places(data.validation_urls, "data.validation_urls")
        require_local_shards([*self._places, *(self._held_out if config.validation.every else [])])
        self._tokenizer = Tokenizer(data.tokenizer, data.eod_id)
        self._access = access(data)
        self._batches: StreamBatches | None = None
        described = [relative_names(self._places), self._tokenizer.sha256, self._tokenizer.eod_id, data.text_field]
        fingerprint = hashlib.sha256(canonical_json(described)).hexdigest()
        self.facts = Facts(
            vocab_size=self._tokenizer.vocab_size,
            eod_id=self._tokenizer.eod_id,
            tokenizer_sha256=self._tokenizer.sha256,
            fingerprint=fingerprint,
            fingerprints={NAME: fingerprint},
            token_counts=None,
        )
        vocabulary = config.model.vocab_size
        if vocabulary is not None and vocabulary < self._tokenizer.vocab_size:
            raise UserError(
                f"model.vocab_size={vocabulary} is smaller than the {self._tokenizer.vocab_size} of "
                f"data.tokenizer={data.tokenizer}; raise it or leave it out"
            )

    def go_on(
        self, config: Config, state: TrainState, checkpoint: Path | None, record: dict[str, Any], dp_size: int
    ) -> None:
        """Begin every rank's stream, or take up those of the checkpoint."""
        if checkpoint is None:
            state.data.stream = [Cursor()] * dp_size
            return
        if record["data_fingerprint"] != self.facts.fingerprint:
            raise UserError(
                f"the shards are {self.facts.fingerprint[:12]} (data.urls, data.eod_id), but {checkpoint} was trained "
                f"on {record['data_fingerprint'][:12]}; name the same shards or choose another run.dir"
            )
        saved = len(state.data.stream)
        if saved != dp_size:
            raise UserError(
                f"{checkpoint} was saved by {saved} data-parallel ranks, and these are {dp_size}: data.mode=stream "
                f"goes on with as many only; start {saved} x parallel.tp x parallel.pp processes or choose another "
                "run.dir"
            )
        if state.data.skipped:
            raise UserError(f"{checkpoint} skips windows of samples, which data.mode=stream cannot")

    def notice(self) -> str:
        """What this mode does not promise."""
        return (
            f"data.mode=stream reads {len(self._places)} shards of raw text. It does not promise: every document once "
            "in the same stretch of steps (each data-parallel rank goes through its shards at its own pace), the same "
            "samples on another number of ranks, shuffled documents (those of a shard come in its order), to notice "
            "changed bytes inside a text, to count what the missing end of a tar held. Shards built by python -m "
            "tools.shards keep all of that."
        )

    def together(self, config: Config, place: Place) -> Together | None:
        """Always: what one rank finds in its shards the others do not."""
        return None if place.world_size == 1 else Together(60 * config.data.source_timeout_minutes)

    def batches(self, config: Config, state: TrainState, place: Place) -> StreamBatches:
        """This rank's training data, from its cursor on."""
        self._batches = StreamBatches(
            self._text(config, self._places, place),
            config.train.seed,
            config.model.sequence_length,
            config.train.micro_batch,
            config.train.global_batch,
            place.dp_rank,
            place.dp_size,
            state.consumed_samples,
            state.data.stream[place.dp_rank],
        )
        return self._batches

    def held_out(self, config: Config, place: Place, together: Together | None) -> list[HeldOut]:
        """This rank's micro batches of the held-out shards."""
        shards = self._text(config, self._held_out, place)
        samples, length, micro_batch = config.validation.samples, config.model.sequence_length, config.train.micro_batch
        rows = do_together(
            together, lambda: read_held_out(shards, samples, length, micro_batch, place.dp_rank, place.dp_size)
        )
        cut = micro_batches(torch.from_numpy(rows.tokens), agree(rows, place), micro_batch)
        return [HeldOut(NAME, 1.0, cut, TextBytes(self._tokenizer))]

    def callbacks(self, config: Config, board: Board, place: Place) -> list[Callback]:
        """Keep the cursors of all ranks in the state."""
        assert self._batches is not None, "there are no batches yet"
        return [StreamProgress(config, self._batches, board, place)]

    def tokenizer(self) -> Tokenizer | None:
        """The run's."""
        return self._tokenizer

    def close(self) -> None:
        """Wait for no source."""
        self._access.close()

    def _text(self, config: Config, places: list[str], place: Place) -> TextShards:
        def report(line: str) -> None:
            # Ranks of other layers and slices of the model read the same.
            if place.tp_rank == 0 and place.pp_rank == 0:
                print(f"warning: {line}", flush=True)

        opener = Opener(self._access.patience)
        return TextShards(places, opener.open, self._tokenizer, config.data.text_field, report)


class StreamProgress:
    """After every step, takes every data-parallel rank's cursor into the state, so that it may be saved at any.

    On log steps it writes what was lost and stops the run at too much.
    """

    def __init__(self, config: Config, batches: StreamBatches, board: Board, place: Place) -> None:
        self._batches = batches
        self._board = board
        self._device = place.device
        self._steps = config.train.steps
        self._every = config.logging.every
        self._limit = config.data.max_bad_samples

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Gather; collective.

        Raises:
            SharedError: more documents were lost than ``data.max_bad_samples`` allows, or ranks that must read the same
                did not.
        """
        cursor = self._batches.cursor_behind(state.consumed_samples)
        # A rank between the ends of a pipeline reads nothing, nor does any of its data-parallel group; what it holds
        # here is never saved.
        own = torch.tensor((cursor or Cursor()).numbers(), dtype=torch.int64)
        group = parallel_state.get_data_parallel_group_gloo()
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        state.data.stream = [Cursor(*numbers.tolist()) for numbers in found]
        if is_due(state.step, self._every, self._steps):
            self._require_the_same(cursor, state.step)
            self._account(state)

    def _require_the_same(self, cursor: Cursor | None, step: int) -> None:
        """See that all ranks of one data-parallel rank that read at all are at the same place, of the same bytes."""
        if cursor is None:
            extremes = torch.full((2, len(Cursor().numbers())), torch.iinfo(torch.int64).min, device=self._device)
        else:
            numbers = torch.tensor(cursor.numbers(), dtype=torch.int64, device=self._device)
            extremes = torch.stack([numbers, -numbers])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
        differ = (extremes[0] != -extremes[1]).any().to(torch.int64)
        dist.all_reduce(differ, op=dist.ReduceOp.MAX)
        if differ:
            raise SharedError(
                f"by step {step} ranks of one tensor- and pipeline-parallel group have read other texts: the shards, "
                "or damage to them, are not the same on all nodes; compare the files and start again from a checkpoint"
            )

    def _account(self, state: TrainState) -> None:
        cursors = state.data.stream
        counts = torch.tensor([[c.read, c.dropped, c.lost] for c in cursors], device=self._device).sum(dim=0)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)  # for the ranks that read nothing
        read, dropped, lost = counts.tolist()
        self._board.scalar("data/documents", read, state.step)
        for name, count in (("dropped", dropped), ("lost", lost)):
            if count:
                self._board.scalar(f"data/{name}_documents", count, state.step)
        if lost > self._limit * max(1.0, read / 1e6):
            raise SharedError(
                f"damaged tars cost {lost} documents, {read} arrived: more than data.max_bad_samples={self._limit} in "
                "a million; restore the shards that the warnings above name, or raise it"
            )
