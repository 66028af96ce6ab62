"""Windows, rollbacks that a restart takes up, limits; reports there and back."""

import dataclasses
import json
from pathlib import Path

import pytest

from pretrain.config import Config, SpikeSettings
from pretrain.config_file import load_config
from pretrain.errors import UserError
from pretrain.recovery import memory, reports
from pretrain.recovery.layers import changes
from pretrain.recovery.memory import Rollback
from pretrain.recovery.rollback import window
from pretrain.state import TrainState
from tests.launch import REPOSITORY

BATCH = 16


def config(*more: str) -> Config:
    return load_config(REPOSITORY / "configs/demo.yaml", [f"train.global_batch={BATCH}", *more])


def at(step: int) -> TrainState:
    return TrainState(step=step, consumed_samples=step * BATCH)


def test_the_window_holds_the_spike_and_what_is_around_it_but_nothing_that_stays_taken() -> None:
    wide = config("spikes.skip_before=5", "spikes.skip_after=2")
    # Seen at step 101, begun at 99: steps 94 to 103, counted from 1.
    assert window(wide, at(100), at(50), onset=99) == (93 * BATCH, 10 * BATCH)
    assert window(wide, at(100), at(97), onset=99) == (97 * BATCH, 6 * BATCH)
    assert window(config("spikes.skip_before=0", "spikes.skip_after=0"), at(100), at(50), 101) == (100 * BATCH, BATCH)


def test_the_window_counts_back_over_the_steps_of_a_ramp() -> None:
    ramp = ["train.rampup.start=8", "train.rampup.increment=8", "train.rampup.samples=80"]
    rising = config("spikes.skip_before=2", "spikes.skip_after=1", *ramp)
    # 10 steps of 8 samples, then 16: the spike of step 12, and the steps 10 to 13.
    spike, target = TrainState(step=11, consumed_samples=96), TrainState(step=5, consumed_samples=40)
    assert window(rising, spike, target, onset=12) == (72, 8 + 3 * 16)


def test_the_window_lies_over_draws_of_which_some_are_left_out_already() -> None:
    spike = at(100)
    spike.data.skip(95 * BATCH, 8 * BATCH, 0)
    narrow = config("spikes.skip_before=0", "spikes.skip_after=0")
    first, count = window(narrow, spike, at(90), onset=101)
    assert [first, first + count] == [108 * BATCH, 109 * BATCH]
    assert list(spike.data.draws(100 * BATCH, BATCH)) == list(range(first, first + count))


def test_a_restart_takes_up_what_its_checkpoint_does_not_know() -> None:
    known, missing = Rollback(40, 30, 600, 64), Rollback(70, 50, 1120, 32)
    state = at(50)
    state.data.skip(600, 64, 0)
    memory.remember(state, [known], {"values": {}}, [])
    memory.take_up(state, [known, missing])
    assert memory.rollbacks(state) == [known, missing]
    assert state.data.skipped == [(600, 64), (1120, 32)]
    memory.take_up(state, [known, missing])
    assert state.data.skipped == [(600, 64), (1120, 32)]
    later = at(80)
    memory.take_up(later, [missing])
    assert not memory.rollbacks(later), "its samples were taken"


def test_the_lower_rate_ends_behind_the_spike() -> None:
    settings = SpikeSettings(lr_factor=0.5, lr_steps=10)
    made = [Rollback(100, 90, 0, 1)]
    assert [memory.lr_factor(made, step, settings) for step in (90, 91, 110, 111)] == [1, 0.5, 0.5, 1]


def test_rollbacks_are_counted_in_the_last_steps() -> None:
    settings = SpikeSettings(max_rollbacks=2, within_steps=100)
    made = [Rollback(100, 90, 0, 1), Rollback(150, 140, 0, 1)]
    assert memory.too_many(made, 160, settings)
    assert memory.too_many(made, 199, settings)
    assert not memory.too_many(made, 200, settings)


def report(step: int, rollback: Rollback | None = None) -> reports.Report:
    layers = changes(
        [{"step": s, "values": {"gradient": [1.0 + s / 100, 1.0, 2.0], "angle_mlp": [0.1]}} for s in range(5)],
        {"step": step, "values": {"gradient": [9.0, 1.0, float("nan")], "angle_mlp": [0.1]}},
    )
    signals = {"loss": reports.Signal(3.0, 2.0, 11.0), "grad_norm": reports.Signal(None, 1.0, None)}
    samples = [reports.Sample(7, "web", 3, 4.0, "a | b `c`"), reports.Sample(8, None, None, None, "")]
    return reports.Report(step, step - 1, signals, 1e-3, "done", rollback, layers, samples)


def test_reports_come_back_and_a_step_seen_again_is_one_report(tmp_path: Path) -> None:
    made = Rollback(9, 6, 100, 20)
    first, second = report(5), report(9, made)
    for _ in range(2):
        reports.write(tmp_path, first)
    reports.write(tmp_path, second, 1)
    assert reports.read_all(tmp_path) == [second, first]
    assert reports.recorded_rollbacks(tmp_path) == [made]
    path = tmp_path / "spikes" / "step-00000005.json"
    told = json.loads(path.read_text())
    window = dataclasses.asdict(made)
    for change, complaint in (
        ({"step": None}, "step: "),
        ({"step": "5"}, "step: "),
        ({"signals": {"loss": {"value": "x", "median": None, "score": None}}}, "signals.loss.value: "),
        ({"rollback": window | {"count": 0}}, "rollback.count: Input should be greater than 0"),
        ({"rollback": window | {"first": 10**30}}, "rollback.first: "),
    ):
        path.write_text(json.dumps(told | change))
        with pytest.raises(UserError, match=rf"step-00000005\.json is no report of a spike: {complaint}"):
            reports.read_all(tmp_path)
    reports.set_aside(tmp_path)
    assert reports.recorded_rollbacks(tmp_path) == []
    assert len(list((tmp_path / "spikes.before-1").iterdir())) == 2


def test_the_layers_that_moved_stand_first() -> None:
    found = report(5).layers
    assert [(one.part, one.quantity) for one in found[:2]] == [("head", "gradient"), ("layer 1", "gradient")]
    assert found[0].value is None
    assert found[1].since == 5
    assert all(one.since is None for one in found[2:])


def test_measurements_of_other_quantities_count_for_nothing() -> None:
    now = {"step": 9, "values": {"gradient": [9.0, 1.0], "angle_mlp": [0.1]}}
    odd = [{"gradient": [1.0]}, {"gradient": [1.0], "angle_mlp": [0.1]}, {}, {"gradient": [1.0, 1.0, 1.0]}]
    found = changes([{"step": step, "values": odd[step % len(odd)]} for step in range(8)], now)
    assert [one.median for one in found] == [None] * 3


def test_a_page_shows_what_breaks_tables() -> None:
    page = dataclasses.replace(report(5), done="the update was made").markdown()
    assert "a \\| b 'c'" in page
    assert "loss 3 (11 spreads above 2), grad_norm not finite" in page
