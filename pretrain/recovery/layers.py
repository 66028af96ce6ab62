"""Which layers moved first: gradient norms and angles of the last log steps, against those of a spike's step."""

import math
from typing import Any

import numpy as np

from megatron_ext import Geometry
from megatron_ext.residual import SUBLAYERS
from pretrain.monitor.spikes import AGREES, score
from pretrain.monitor.tags import PARTS
from pretrain.recovery.reports import LayerChange

KEPT = 32
"""Log steps that are remembered."""
FEWEST = 4
"""Measurements that make a median."""
SHOWN = 10


def measurement(step: int, gradients: list[float], geometry: Geometry) -> dict[str, Any]:
    """What is remembered of a step, JSON-ready but for numbers that are not finite."""
    angles = {
        f"angle_{sublayer}": geometry.mean_angle[:, position].tolist() for position, sublayer in enumerate(SUBLAYERS)
    }
    return {"step": step, "values": {"gradient": gradients} | angles}


def is_finite(measured: dict[str, Any]) -> bool:
    """Whether all of it is; other measurements are no history."""
    return all(math.isfinite(value) for values in measured["values"].values() for value in values)


def changes(history: list[dict[str, Any]], now: dict[str, Any]) -> list[LayerChange]:
    """The layers' quantities at a spike, those that left their usual range first ahead, then the farthest.

    Args:
        history: measurements of earlier steps, in order; those of other quantities, as a checkpoint of another version
            may hold, count for nothing.
    """
    history = [one for one in history if _quantities(one) == _quantities(now)]
    found = []
    for quantity, values in now["values"].items():
        for index, value in enumerate(values):
            before = np.array([one["values"][quantity][index] for one in history], dtype=np.float64)
            steps = [one["step"] for one in history]
            found.append(_change(_part(index, quantity, values), quantity, value, before, steps, now["step"]))
    return sorted(found, key=_order)[:SHOWN]


def _quantities(measured: dict[str, Any]) -> dict[str, int]:
    return {quantity: len(values) for quantity, values in measured["values"].items()}


def _order(one: LayerChange) -> tuple[float, float]:
    far = math.inf if one.value is None else one.score or 0.0
    return (math.inf if one.since is None else one.since, -far)


def _part(index: int, quantity: str, values: list[float]) -> str:
    layers = len(values) - len(PARTS) if quantity == "gradient" else len(values)
    return f"layer {index + 1}" if index < layers else PARTS[index - layers]


def _change(part: str, quantity: str, value: float, before: Any, steps: list[int], now: int) -> LayerChange:
    finite = math.isfinite(value)
    if len(before) < FEWEST:
        return LayerChange(part, quantity, value if finite else None, None, None, None if finite else now)
    median, far = float(np.median(before)), float(score(before, np.array(value)))
    since = None
    if far > AGREES:
        since = now
        for step, seen in zip(reversed(steps), score(before[None, :], before[::-1]) > AGREES, strict=True):
            if not seen:
                break
            since = step
    return LayerChange(part, quantity, value if finite else None, median, far if finite else None, since)
