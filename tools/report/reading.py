"""What a run's event files and its config.yaml say."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.errors import UserError
from pretrain.monitor.tags import BY_TOKENS, layer_tag

AXES = ("steps", "tokens", "hours")
_TEXT_SUFFIX = "/text_summary"


@dataclass(frozen=True)
class Curve:
    """Points of one tag, by step: fp64 arrays ``[n]``."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> "Curve":
        """Without the points that are not finite."""
        kept = np.isfinite(self.values)
        return Curve(self.steps[kept], self.values[kept])


NOTHING = Curve(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        name: short, unlike the others'.
        curves: by tag.
        texts: (tag, step, Markdown) in the order of steps.
        settings: section.key -> value as YAML; empty where there is no config.yaml.
        clock: ``[n, 3]``: steps, tokens and hours of training at points of the loss; empty if not recorded.
    """

    name: str
    curves: Mapping[str, Curve]
    texts: Sequence[tuple[str, int, str]]
    settings: Mapping[str, str]
    clock: np.ndarray

    def curve(self, tag: str) -> Curve:
        """Of a tag; without points where the run has none."""
        return self.curves.get(tag, NOTHING)

    def along(self, steps: np.ndarray, axis: str) -> np.ndarray:
        """The place of ``steps`` on one of :data:`AXES`."""
        if axis == "steps" or not len(steps):
            return steps
        return np.asarray(np.interp(steps, self.clock[:, 0], self.clock[:, AXES.index(axis)]))

    @cached_property
    def num_layers(self) -> int:
        """As many as have a curve of the attention's angle; 0 without geometry."""
        layer = 0
        while layer_tag("geometry/angle_attention", layer + 1) in self.curves:
            layer += 1
        return layer

    def layers(self, name: str) -> list[Curve]:
        """The finite points of a quantity of each layer, ``name`` as geometry/angle_mlp."""
        return [self.curve(layer_tag(name, layer)).finite for layer in range(1, self.num_layers + 1)]


def read_runs(paths: Sequence[Path], axis: str) -> list[RunRecord]:
    """All runs, each under a name of its own.

    Raises:
        UserError: a folder is no run, holds no curve or cannot be read, or does not know the axis.
    """
    runs = [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    for path, run in zip(paths, runs, strict=True):
        if axis != "steps" and not len(run.clock):
            raise UserError(f"{path} has no record of {axis} (tensorboard/{BY_TOKENS}); leave out --axis")
    return runs


def _read(path: Path, name: str) -> RunRecord:
    folder = path / "tensorboard" if (path / "tensorboard").is_dir() else path
    if not folder.is_dir():
        raise UserError(f"{path} is no folder; name a run's folder (run.dir)")
    if not _has_events(folder):
        raise UserError(f"{path} has no TensorBoard files; name a run's folder (run.dir) that has trained")
    events = _load(folder)
    curves = {tag: _curve(events.Scalars(tag)) for tag in events.Tags()["scalars"]}
    if not len(curves.get("train/loss", NOTHING).steps):
        raise UserError(f"{path} has no point of train/loss; has the run reached its first log step?")
    texts = sorted(
        (point.step, tag.removesuffix(_TEXT_SUFFIX), point.tensor_proto.string_val[0].decode(errors="replace"))
        for tag in events.Tags()["tensors"]
        if tag.endswith(_TEXT_SUFFIX)
        for point in events.Tensors(tag)
    )
    return RunRecord(
        name,
        curves,
        [(tag, step, text) for step, tag, text in texts],
        _settings(path / "config.yaml"),
        _clock(folder / BY_TOKENS, curves["train/loss"]),
    )


def _load(folder: Path) -> EventAccumulator:
    """Points that a later start of the run replaced are left out, as TensorBoard does."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    try:
        events.Reload()
    except Exception as error:  # the loader raises what its protocol buffers and files raise, of many kinds
        raise UserError(f"the TensorBoard files in {folder} cannot be read: {type(error).__name__}: {error}") from error
    return events


def _has_events(folder: Path) -> bool:
    return any(path.stat().st_size for path in folder.glob("*tfevents*"))


def _curve(points: Any) -> Curve:
    """The last value of each step, in order."""
    table = {int(point.step): float(point.value) for point in points}
    steps = sorted(table)
    return Curve(np.array(steps, dtype=float), np.array([table[step] for step in steps]))


def _clock(folder: Path, loss: Curve) -> np.ndarray:
    """Both have a point for every step, so the n-th belong together; nothing where one lost some.

    At its end either may have more: a run that goes on wrote between our looks, or a kill cut one off.
    """
    if not _has_events(folder):
        return np.zeros((0, 3))
    events = _load(folder)
    found = events.Scalars("train/loss_by_tokens") if "train/loss_by_tokens" in events.Tags()["scalars"] else []
    points = {int(point.step): (point.wall_time, float(point.value)) for point in found}
    tokens = sorted(points)[: len(loss.steps)]
    seconds, values = np.array([points[count] for count in tokens]).reshape(-1, 2).T
    if not len(tokens) or not np.array_equal(values, loss.values[: len(tokens)], equal_nan=True):
        return np.zeros((0, 3))
    return np.stack([loss.steps[: len(tokens)], np.array(tokens, float), (seconds - seconds[0]) / 3600], axis=1)


def _settings(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {type(error).__name__}") from None
    return dict(_leaves("", tree))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), below)
    else:
        yield name, "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"{paths[0]} is named twice, or another run is; name each once")


def last(curve: Curve) -> float:
    """Its last value, NaN without any."""
    return float(curve.values[-1]) if len(curve.values) else math.nan
