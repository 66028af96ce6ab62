"""The one TensorBoard writer of a run."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import hparams, text

from pretrain.monitor.event_file import EventFile
from pretrain.monitor.tags import BY_TOKENS


class Board:
    """Writes scalars and text on global rank 0 and nothing elsewhere.

    Points of an earlier start of the run at later steps than ``resumed_step`` are purged, so a resumed curve never
    runs twice. TensorBoard honours this only in a run whose first file says so too, hence also on a fresh start.
    """

    def __init__(self, directory: Path, resumed_step: int, global_rank: int, resumed_tokens: int = 0) -> None:
        self._writer: EventFile | None = None
        self._by_tokens: EventFile | None = None
        if global_rank == 0:
            self._writer = _writer(directory, resumed_step)
            self._by_tokens = _writer(directory / BY_TOKENS, resumed_tokens)

    def rewind(self, step: int, tokens: int) -> None:
        """Go on from an earlier ``step`` with so many ``tokens``: later points are purged, as on a resume."""
        for writer, last in ((self._writer, step), (self._by_tokens, tokens)):
            if writer is not None:
                writer.purge(last + 1)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """One point of the curve ``tag``."""
        self.scalars({tag: value}, step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """A point of each curve, tag -> value; all at once costs a fortieth of one by one."""
        if self._writer is not None:
            _add(self._writer, values, step, time.time())

    def scalars_by_tokens(self, values: Mapping[str, float], tokens: int, at: float) -> None:
        """Points of curves over tokens; ``at`` is their Unix time, which the page's axis "relative" counts in hours."""
        if self._by_tokens is not None:
            _add(self._by_tokens, values, tokens, at)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """A text in Markdown."""
        if self._writer is not None:
            self._writer.add(Event(summary=text(tag, markdown)), step)  # type: ignore[no-untyped-call]

    def layout(self, layout: layout_pb2.Layout) -> None:
        """What the tab CUSTOM SCALARS shows."""
        if self._writer is not None:
            content = TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()])
            marked = custom_scalars.create_summary_metadata()
            value = Summary.Value(tag=custom_scalars.CONFIG_SUMMARY_TAG, metadata=marked, tensor=content)
            self._writer.add(Event(summary=Summary(value=[value])), 0)

    def settings(
        self, values: Mapping[str, bool | int | float | str], first: Sequence[str], metrics: Sequence[str]
    ) -> None:
        """What the tab HPARAMS compares: the run's settings and the newest points of the curves ``metrics``.

        The page shows five settings unless told otherwise: those named ``first`` come before all others.
        """
        if self._writer is not None:
            page, start, end = hparams(dict(values), dict.fromkeys(metrics, 0.0))  # type: ignore[no-untyped-call]
            marked = page.value[0].metadata.plugin_data
            content = HParamsPluginData.FromString(marked.content)
            for info in content.experiment.hparam_infos:
                info.differs = info.name in first
            marked.content = content.SerializeToString()
            for summary in (page, start, end):
                self._writer.add(Event(summary=summary), 0)

    def flush(self) -> None:
        """Write everything out, so that a killed run keeps its curves."""
        for writer in (self._writer, self._by_tokens):
            if writer is not None:
                writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        for writer in (self._writer, self._by_tokens):
            if writer is not None:
                writer.close()


def _writer(directory: Path, resumed: int) -> EventFile:
    return EventFile(directory, purge_from=resumed + 1 if resumed else 0)


def _add(writer: EventFile, values: Mapping[str, float], step: int, at: float) -> None:
    points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    writer.add(Event(summary=Summary(value=points)), step, at)
