"""Which layers moved first: gradient norms and angles of the last log steps, against those of a spike's step."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext import Geometry
from megatron_ext.initialize import global_names
from megatron_ext.residual import SUBLAYERS
from pretrain.deepspeed_compat import owned_gradient, owned_range
from pretrain.engine import Engine
from pretrain.monitor.spikes import AGREES, score
from pretrain.recovery.reports import LayerChange

KEPT = 32
"""Log steps that are remembered."""
FEWEST = 4
"""Measurements that make a median."""
SHOWN = 10
_PREFIX = "decoder.layers."


def gradient_norms(engine: Engine, num_layers: int) -> list[float]:
    """Norm of the reduced gradient of each layer, then of the embedding, then of all behind the layers; collective.

    The same in every layout.
    """
    squares = torch.zeros(num_layers + 2, dtype=torch.float64, device=engine.place.device)
    for name, parameter in global_names(engine.module).items():
        if owned_range(parameter) is None or not engine.answers_for(parameter):
            continue
        if name.startswith(_PREFIX):
            row = int(name.removeprefix(_PREFIX).split(".", 1)[0])
        else:
            row = num_layers + int(not name.startswith("embedding."))
        squares[row] += owned_gradient(parameter).double().square().sum()
    dist.all_reduce(squares)
    norms: list[float] = squares.sqrt().tolist()
    return norms


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
        history: measurements of earlier steps, in order.
    """
    found = []
    for quantity, values in now["values"].items():
        for index, value in enumerate(values):
            before = np.array([one["values"][quantity][index] for one in history])
            steps = [one["step"] for one in history]
            found.append(_change(_part(index, quantity, values), quantity, value, before, steps, now["step"]))
    return sorted(found, key=_order)[:SHOWN]


def _order(one: LayerChange) -> tuple[float, float]:
    far = math.inf if one.value is None else one.score or 0.0
    return (math.inf if one.since is None else one.since, -far)


def _part(index: int, quantity: str, values: list[float]) -> str:
    layers = len(values) - 2 if quantity == "gradient" else len(values)
    return f"layer {index + 1}" if index < layers else ("embedding", "head")[index - layers]


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
