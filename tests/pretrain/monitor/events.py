"""What TensorBoard reads from a folder of event files."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def texts(events: EventAccumulator) -> set[str]:
    """Tags of texts, without the suffix that torch's writer gives them."""
    return {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")}


def layout(events: EventAccumulator) -> layout_pb2.Layout:
    """Of the tab CUSTOM SCALARS, the newest."""
    return layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
