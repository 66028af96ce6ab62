"""The detector against planted spikes, and the light form of its study."""

import json
import math

import numpy as np
import pytest

from pretrain.config import SpikeSettings
from pretrain.monitor.spikes import Detector, Verdict, calls_for_action, score
from tools.bench import spikes as study

SETTINGS = SpikeSettings()


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return 3.0 + 0.03 * np.random.default_rng(seed).standard_normal(steps)


def judged(detector: Detector, losses: np.ndarray, norms: np.ndarray, first: int = 1) -> list[Verdict]:
    pairs = zip(losses.tolist(), norms.tolist(), strict=True)
    return [detector.judge(step, {"loss": a, "grad_norm": b}) for step, (a, b) in enumerate(pairs, start=first)]


def test_a_score_counts_spreads_above_the_median() -> None:
    window = np.array([1.0, 2.0, 3.0, 4.0, 100.0])  # median 3, median deviation 1
    assert score(window, np.array(3 + 1.4826 * 5)) == pytest.approx(5)
    assert score(window, np.array(math.nan)) == math.inf
    assert score(np.full(8, 2.0), np.array(2.0)) == 0


@pytest.mark.parametrize(
    ("loss", "grad_norm", "acts"),
    [
        ([0, 0, 0, 0, 10.1], [0, 0, 0, 0, 0], True),
        ([0, 0, 0, 0, 9.9], [0, 0, 0, 0, 0], False),
        ([8, 0, 8, 0, 8], [0, 0, 0, 0, 0], True),
        ([8, 8, 8, 0, 0], [0, 0, 0, 0, 0], False),  # it is over
        ([8, 0, 0, 0, 8], [0, 0, 0, 0, 0], False),
        ([0, 0, 0, 0, 2.9], [0, 0, 0, 0, 50], False),  # the clip's business
        ([0, 0, 0, 0, 3.1], [0, 0, 0, 0, 11], True),
        ([0, 0, 0, 0, 3.1], [8, 0, 8, 0, 8], True),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, math.inf], True),
        ([0, 0, 0, 0, math.inf], [0, 0, 0, 0, 0], True),
        ([0, 0, 0, 0, 0], [0, 0, 0, math.inf, 0], False),
    ],
)
def test_when_to_act(loss: list[float], grad_norm: list[float], acts: bool) -> None:
    assert bool(calls_for_action(np.array(loss), np.array(grad_norm), SETTINGS)) == acts


def test_what_is_not_finite_is_seen_at_once_and_kept_out_of_the_window() -> None:
    detector = Detector(SETTINGS, judge_from=1000)
    (verdict,) = judged(detector, np.array([math.nan]), np.array([1.0]))
    assert verdict.act
    assert verdict.told == ["loss"]
    assert detector.state_dict()["values"] == {"loss": [], "grad_norm": [1.0]}


def test_nothing_is_judged_in_the_warmup_or_before_the_window_is_full() -> None:
    for judge_from, jump in ((0, 127), (300, 299)):
        losses = noise(400)
        losses[jump - 1] += 3
        verdicts = judged(Detector(SETTINGS, judge_from), losses, noise(400, 1))
        assert not any(verdict.told for verdict in verdicts[:jump])
        losses[jump + 3] += 3
        assert judged(Detector(SETTINGS, judge_from), losses, noise(400, 1))[jump + 3].act


def test_the_onset_of_a_ramp_lies_near_its_foot() -> None:
    losses = noise(300)
    losses[200:] += 0.03 * np.arange(100) * 0.8
    verdicts = judged(Detector(SETTINGS), losses, noise(300, 1))
    first = next(verdict for verdict in verdicts if verdict.act)
    assert 202 <= first.onset <= 212


def test_a_restart_changes_no_verdict() -> None:
    losses, norms = noise(400), noise(400, 1)
    losses[[250, 252, 254]] += 0.3
    norms[251] = math.inf
    whole = judged(Detector(SETTINGS), losses, norms)
    for cut in (100, 251, 252, 253):
        before, after = Detector(SETTINGS), Detector(SETTINGS)
        judged(before, losses[:cut], norms[:cut])
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert [str(one) for one in judged(after, losses[cut:], norms[cut:], cut + 1)] == [
            str(one) for one in whole[cut:]
        ]


@pytest.mark.parametrize("correlation", [0.5, 0.9])
def test_the_study_in_small(correlation: float) -> None:
    """Both signals noisy, 10 seeds; ``python -m tools.bench spikes`` has all of it."""
    found = study.study(correlation, seeds=10, seed=2)
    assert found.false_actions <= 1
    assert found.found["lone, loss"] >= 0.9
    assert found.found["ramp, loss"] >= 0.9
    assert found.found["lone, both"] >= 0.9


def test_the_study_judges_as_the_detector_does() -> None:
    losses, norms = study.noisy_run(0.5, 1, 900, seed=4)
    losses[0, 700:720] += 2
    acts = study.actions(losses, norms, SETTINGS)[0]
    verdicts = judged(Detector(SETTINGS), losses[0], norms[0])
    assert [verdict.act for verdict in verdicts] == acts.tolist()
    assert acts[700:].any()
