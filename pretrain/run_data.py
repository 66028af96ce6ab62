"""The data of a run, whatever mode they are read in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pretrain.config import Config
from pretrain.data.batches import Batches
from pretrain.data.tokenizer import Tokenizer
from pretrain.datasets import Facts
from pretrain.evaluate import HeldOut
from pretrain.loop import Callback
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.sharded import ShardedData
from pretrain.state import TrainState
from pretrain.streamed import StreamedData
from pretrain.together import Together


class RunData(Protocol):
    """What a run asks of its data, in the order of the methods.

    Attributes:
        facts: what model and checkpoints must know.
    """

    facts: Facts

    def go_on(
        self, config: Config, state: TrainState, checkpoint: Path | None, record: dict[str, Any], dp_size: int
    ) -> None:
        """Begin, or go on where ``state``, from ``checkpoint`` with this ``record``, stands.

        Raises:
            UserError: these data cannot go on from there.
        """

    def notice(self) -> str:
        """One line to tell first about this way to read data; may be empty."""

    def together(self, config: Config, place: Place) -> Together | None:
        """Where one rank alone may fail to get its samples; collective."""

    def batches(self, config: Config, state: TrainState, place: Place) -> Batches:
        """This rank's training data."""

    def held_out(self, config: Config, place: Place, together: Together | None) -> list[HeldOut]:
        """This rank's micro batches of each data set that validation reads; collective."""

    def callbacks(self, config: Config, board: Board, place: Place) -> list[Callback]:
        """What must happen behind each step, before it may be saved."""

    def tokenizer(self) -> Tokenizer | None:
        """What turns tokens back into text, where it is known."""

    def close(self) -> None:
        """Have nobody wait for a source any longer."""


_MODES: dict[str, Callable[[Config], RunData]] = {"shards": ShardedData, "stream": StreamedData}


def open_data(config: Config) -> RunData:
    """Read what describes the data, and check it against the settings.

    Raises:
        UserError: they cannot be used.
    """
    return _MODES[config.data.mode](config)
