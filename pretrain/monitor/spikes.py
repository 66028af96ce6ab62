"""Loss spikes: is this step's loss or gradient norm far above what the last steps had?

Both are compared with the median of the last finite values, in units of their spread (1.4826 x the median absolute
deviation, which is the standard deviation of normal noise). Mean and standard deviation would be of no use: a loss that
climbs over tens of steps inflates them faster than it leaves them behind.

The loss alone decides, and the gradient norm where the loss agrees: acting on either by itself would double the false
actions, and a gradient that is large without a worse loss is what the clip is for. ``python -m tools.bench spikes``
measures the rule.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.config import SpikeSettings

SIGNALS = ("loss", "grad_norm")
RECENT = 5
"""Steps, this one included, among which a lasting rise is looked for."""
SIGMAS_OF_MAD = 1.4826
LEAST_RELATIVE_SPREAD = 1e-4
"""Of the centre: values that hardly differ would make a spike of any change."""
AGREES = 3.0
"""Spreads that the loss lies above its centre where it agrees with the gradient norm."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    """What was seen at a step.

    Attributes:
        scores: signal -> spreads above its centre; inf for a value that is not finite, 0 where nothing is judged yet.
        centres: signal -> median of the window; nan where nothing is judged yet.
        told: signals whose score is above ``spikes.log``.
        act: whether it calls for action.
        onset: step at which this spike began; the step itself where nothing is told.
    """

    scores: Mapping[str, float]
    centres: Mapping[str, float]
    told: Sequence[str]
    act: bool
    onset: int


def score(window: Array, value: Array) -> Array:
    """Spreads that ``value`` lies above the centre of ``window``, negative below it.

    Args:
        window: ``[..., n]``, finite.
        value: ``[...]``; where it is not finite the score is inf.
    """
    centre = np.median(window, axis=-1)
    spread = SIGMAS_OF_MAD * np.median(np.abs(window - centre[..., None]), axis=-1)
    least = np.maximum(LEAST_RELATIVE_SPREAD * np.abs(centre), np.finfo(np.float64).tiny)
    finite = np.isfinite(value)
    above = (np.where(finite, value, centre) - centre) / np.maximum(spread, least)
    return np.asarray(np.where(finite, above, np.inf))


def calls_for_action(loss: Array, grad_norm: Array, settings: SpikeSettings) -> npt.NDArray[np.bool_]:
    """Whether the newest of the scores does, alone or with those before it.

    Args:
        loss, grad_norm: scores of the last steps ``[..., at most RECENT]``.
    """

    def is_high(scores: Array) -> npt.NDArray[np.bool_]:
        told = scores > settings.log
        lasts = told[..., -1] & (told.sum(axis=-1) >= settings.lasting)
        return np.asarray((scores[..., -1] > settings.act) | lasts)

    agreed = is_high(grad_norm) & (loss[..., -1] > AGREES)
    infinite = np.isinf(loss[..., -1]) | np.isinf(grad_norm[..., -1])
    return np.asarray(is_high(loss) | agreed | infinite)


class Detector:
    """Judges the steps of a run one after another, from what it was given alone, so that all ranks agree."""

    def __init__(self, settings: SpikeSettings, judge_from: int = 0) -> None:
        """Begin.

        Args:
            judge_from: values of steps before it fill the windows, and only count as spikes if they are not finite.
        """
        self._settings, self._judge_from = settings, judge_from
        self._values = {name: deque[float](maxlen=settings.window) for name in SIGNALS}
        self._scores = {name: deque[float](maxlen=settings.window) for name in SIGNALS}

    def judge(self, step: int, values: Mapping[str, float]) -> Verdict:
        """Compare the values of 1-based ``step`` with those before it, then remember them."""
        scores, centres = {}, {}
        for name in SIGNALS:
            scores[name], centres[name] = self._score(name, step, values[name])
            self._scores[name].append(scores[name])
            if math.isfinite(values[name]):
                self._values[name].append(values[name])
        recent = [np.array(self._scores[name])[-RECENT:] for name in SIGNALS]
        act = bool(calls_for_action(recent[0], recent[1], self._settings))
        told = [name for name in SIGNALS if scores[name] > self._settings.log]
        return Verdict(scores, centres, told, act, self._onset(step) if told else step)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "values": {name: list(values) for name, values in self._values.items()},
            # JSON knows no infinity.
            "scores": {name: [min(seen, 1e300) for seen in scores] for name, scores in self._scores.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave; nothing for a fresh start."""
        for kept, name in ((self._values, "values"), (self._scores, "scores")):
            for signal in SIGNALS:
                kept[signal].clear()
                kept[signal].extend(map(float, state[name][signal] if state else []))

    def _score(self, name: str, step: int, value: float) -> tuple[float, float]:
        """Score and centre."""
        known = self._values[name]
        if step < self._judge_from or len(known) < self._settings.window:
            return (0.0 if math.isfinite(value) else math.inf), math.nan
        window = np.array(known)
        return float(score(window, np.array(value))), float(np.median(window))

    def _onset(self, step: int) -> int:
        """Where the rise that ends at ``step`` began: the first of the steps that stayed above half of ``spikes.log``.

        Up to RECENT - 1 steps in a row may have been below.
        """
        highest = np.maximum(*(np.array(self._scores[name]) for name in SIGNALS))
        onset, below = step, 0
        for back, seen in enumerate(highest[::-1]):
            below = 0 if seen > self._settings.log / 2 else below + 1
            if below >= RECENT:
                break
            if below == 0:
                onset = step - back
        return onset
