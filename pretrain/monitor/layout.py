"""What the tab CUSTOM SCALARS shows: the first page, then all layers of each quantity in one chart."""

import re
from collections.abc import Mapping, Sequence

from tensorboard.plugins.custom_scalar import layout_pb2

from pretrain.monitor.tags import layer_tag

FEW_LAYERS = 5
"""All curves of a run have its colour and differ by their markers; more cannot be told apart."""


def some_layers(num_layers: int, count: int = FEW_LAYERS) -> list[int]:
    """At most ``count`` 1-based layers, evenly spread from the first to the last."""
    count = min(count, num_layers)
    return sorted({1 + round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def first_page(num_layers: int, has_mfu: bool) -> Mapping[str, Sequence[str]]:
    """Title -> the tags of its chart."""
    layers = some_layers(num_layers)

    def at_some(name: str) -> list[str]:
        return [layer_tag(name, layer) for layer in layers]

    charts: dict[str, Sequence[str]] = {
        "loss, validation loss, spikes": ["train/loss", "validation/loss", "events/spike"],
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/lr"],
        "angle of attention, some layers": at_some("geometry/angle_attention"),
        "angle of the MLP, some layers": at_some("geometry/angle_mlp"),
        "collapse: resultant length, some layers": at_some("geometry/resultant_length"),
        "tokens per second": ["throughput/tokens_per_second"],
        "model TFLOP/s per GPU": ["throughput/model_tflops_per_gpu"],
    }
    if has_mfu:
        charts["MFU"] = ["throughput/mfu"]
    return charts


def board_layout(
    num_layers: int, has_mfu: bool, geometry: Sequence[str], gradients: Sequence[str]
) -> layout_pb2.Layout:
    """The whole tab.

    Args:
        num_layers: of the model.
        has_mfu: whether the peak of the GPUs is known.
        geometry: the run's quantities of the group, without the layer.
        gradients: likewise.
    """
    pages = [
        _category("first page", first_page(num_layers, has_mfu)),
        _category("geometry, all layers", {name: [f"geometry/{name}/"] for name in geometry}, prefixes=True),
        _category("gradients, all layers", {name: [f"gradients/{name}/"] for name in gradients}, prefixes=True),
        _category("time of a step", {"seconds a step": ["throughput/seconds_"]}, prefixes=True),
    ]
    for page in pages[1:]:
        page.closed = True
    return layout_pb2.Layout(category=pages)


def _category(title: str, charts: Mapping[str, Sequence[str]], prefixes: bool = False) -> layout_pb2.Category:
    end = "" if prefixes else "$"
    return layout_pb2.Category(
        title=title,
        chart=[
            layout_pb2.Chart(
                title=name,
                multiline=layout_pb2.MultilineChartContent(tag=[f"^{re.escape(tag)}{end}" for tag in tags]),
            )
            for name, tags in charts.items()
        ],
    )
