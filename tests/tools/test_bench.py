"""The benchmarks' door, their arithmetic, and the peer of `step`, checked in a worker: DeepSpeed keeps global state."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext import ParallelSettings
from tests.launch import REPOSITORY, launch
from tools.bench import BENCHMARKS, pairs
from tools.bench.report import table
from tools.bench.step import PRESETS
from tools.bench.step_timing import bench_config


def bench(*arguments: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments],
        cwd=REPOSITORY,
        env=os.environ | (variables or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def timings(**walls: list[float]) -> pairs.Rounds:
    return {name: [pairs.Timing(wall, 2 * wall) for wall in column] for name, column in walls.items()}


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    names = ("a", "b", "c")
    contenders = {name: lambda name=name: turns.append(name) for name in names}
    waits: list[int] = []
    result = pairs.interleave(contenders, 3, lambda: waits.append(len(turns)))
    assert turns == ["a", "b", "c"] * 3
    assert {name: len(column) for name, column in result.items()} == dict.fromkeys(names, 3)
    # Waited for before and after each turn.
    assert waits == [count for turn in range(9) for count in (turn, turn + 1)]


def test_a_rehearsed_turn_is_taken_twice_and_timed_once() -> None:
    taken: list[str] = []
    turns: dict[str, pairs.Turn] = {"a": lambda: taken.append("a"), "b": lambda: taken.append("b")}
    timings = pairs.interleave(turns, 2, rehearse=True)
    assert taken == ["a", "a", "b", "b"] * 2
    assert [len(column) for column in timings.values()] == [2, 2]


def test_a_turn_is_timed_to_the_end_of_the_device_s_work_and_sleep_is_no_cpu_time() -> None:
    pending = []

    def synchronize() -> None:
        if pending:
            time.sleep(pending.pop())

    (timing,) = pairs.interleave({"late": lambda: pending.append(0.05)}, 1, synchronize)["late"]
    assert timing.wall >= 0.05
    assert timing.cpu < timing.wall


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine slows down from round to round; the ratio of the medians would be 4.
    ratio = pairs.ratio(timings(mine=[1.0, 4.0, 9.0], peer=[1.0, 1.0, 10.0]), "mine", "peer")
    assert (ratio.minimum, ratio.median, ratio.maximum) == (0.9, 1.0, 4.0)


def test_a_ratio_of_cpu_time_leaves_the_wall_out() -> None:
    computed = iter(range(100))
    turns: dict[str, pairs.Turn] = {"a": lambda: None, "b": lambda: next(computed), "c": lambda: next(computed)}
    clocks = dict.fromkeys("ab", lambda: next(computed))
    measured = pairs.interleave(turns, 1, clocks=clocks)
    assert [timing.cpu for timing in (*measured["a"], *measured["b"])] == [1, 2]
    assert measured["c"][0].cpu < 1, "the process's own clock"
    assert pairs.ratio(measured, "b", "a", pairs.cpu).median == 2.0


def test_spread() -> None:
    assert pairs.spread([5.0, 1.0, 4.0, 2.0, 3.0]) == pairs.Spread(1.0, 2.0, 3.0, 4.0, 5.0)
    assert pairs.spread([7.0]) == pairs.Spread(*[7.0] * 5)


def test_a_machine_that_gives_too_few_cores_is_told() -> None:
    measured = timings(a=[1.0, 3.0, 2.0], b=[2.0, 2.0, 2.0])
    measured["a"][1] = pairs.Timing(wall=300.0, cpu=6.0)  # one disturbed turn, as the median of the times ignores it
    assert pairs.cores_given(measured["a"]) == 2.0
    assert pairs.doubt(measured, threads=2) == ""
    assert "on 2.00 of 4 cores" in pairs.doubt(measured, threads=4)


def test_table_is_aligned() -> None:
    assert table(["", "ms"], [["plain", "1.0"], ["geo", "10.25"]]) == "          ms\nplain    1.0\ngeo    10.25"


def test_every_benchmark_tells_its_options() -> None:
    for name in BENCHMARKS:
        shown = bench(name, "--help")
        assert shown.returncode == 0, shown.stderr
        assert "--json" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stop"], "invalid choice: 'stop' (choose from"),
        (["step", "--threads", "two"], "'two' is no positive integer"),
        (["step", "--rounds", "0"], "'0' is no positive integer"),
        (["data", "--only", "speed"], "invalid choice: 'speed'"),
        (["data", "--folder", "no/such/folder", "--only", "resume"], "error: --folder no/such/folder: No such file"),
        (["step", "--json", "no/such/folder/x.json"], "error: --json no/such/folder/x.json: name a file in a folder"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    ended = bench(*arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_preset_s_step_is_two_micro_batches_on_one_process(preset: str, precision: str) -> None:
    config = bench_config(PRESETS[preset], precision, micro_batch=3)
    assert (config.train.micro_batch, config.train.global_batch) == (3, 6)
    assert config.train.precision == precision
    assert config.parallel == ParallelSettings()
    assert config.model.vocab_size is not None
    own = bench_config(PRESETS[preset], precision, micro_batch=None).train
    assert own.global_batch == 2 * own.micro_batch


@pytest.mark.parametrize("name", ["step", "residual"])
def test_several_processes_are_refused(name: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = bench(name, "--preset", "tiny", variables=variables)
    assert ended.returncode == 2
    assert ended.stderr == f"error: {name} runs in one process, not in 2; start it without torchrun or srun\n"


@pytest.mark.dist
def test_the_peer_computes_what_the_engine_computes() -> None:
    (output,) = launch("tests.tools.bench_worker", 1)
    assert output.splitlines()[-1] == "all checks passed"


@pytest.mark.dist
def test_step_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    options = [
        "--preset",
        "tiny",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--precision",
        "fp32",
        "--two-ranks",
        "--json",
        str(path),
    ]
    ended = bench("step", *options)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(path.read_text())
    assert content["benchmark"] == "step"
    assert content["machine"]["threads"] == 1
    assert content["settings"]["train"]["precision"] == "fp32"
    results = content["results"]
    assert list(results) == ["plain", "pre_norm", "geonorm", "geonorm, tp2", "geonorm, dp2"]
    for name, row in results.items():
        walls = [turn["wall"] for turn in row["rounds"]]
        assert len(walls) == 2
        assert row["wall_s"]["median"] == pytest.approx(sum(walls) / 2)
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 64 / row["wall_s"]["median"])
        assert f"{row['wall_s']['median'] * 1e3:.1f}" in ended.stdout
        assert any(line.startswith(name) for line in ended.stdout.splitlines())
    assert results["geonorm"]["ratio_to"]["pre_norm"]["median"] > 0
    for layout in ("tp2", "dp2"):
        row = results[f"geonorm, {layout}"]
        assert row["first_loss"] == pytest.approx(results["geonorm"]["first_loss"], rel=1e-5), layout
        assert row["cpu_over_wall"] > 0
    assert results["plain"]["first_loss"] == pytest.approx(results["pre_norm"]["first_loss"], rel=1e-5)
    assert results["geonorm"]["first_loss"] != pytest.approx(results["pre_norm"]["first_loss"], rel=1e-5)


def test_a_turn_is_prepared_outside_its_time() -> None:
    (timing,) = pairs.interleave({"quick": lambda: None}, 1, lambda: None, lambda: time.sleep(0.05))["quick"]
    assert timing.wall < 0.05


@pytest.mark.dist
def test_checkpoint_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    ended = bench(
        *("checkpoint", "--preset", "tiny", "--rounds", "2", "--threads", "1"),
        *("--folder", str(tmp_path), "--json", str(path)),
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads(path.read_text())["results"]
    assert list(results["rows"]) == ["plain write", "save", "stall", "crc32", "plain read", "load"]
    assert all(len(turns) == 2 for turns in results["rows"].values())
    saves = [turn["wall"] for turn in results["rows"]["save"]]
    stalls = [turn["wall"] for turn in results["rows"]["stall"]]
    ratios = sorted(stall / save for stall, save in zip(stalls, saves, strict=True))
    assert results["ratios"]["stall / save"]["median"] == pytest.approx(sum(ratios) / 2)
    assert results["bytes"] % 12 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.json"]


@pytest.mark.dist
def test_logging_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "logging.json"
    ended = bench("logging", "--preset", "tiny", "--rounds", "3", "--threads", "1", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    content = json.loads(path.read_text())
    results, every = content["results"], content["settings"]["every"]
    rounds = results["rounds"]
    assert list(rounds) == ["not watched", "+ geometry", "+ norms per layer", "log step, all of it"]
    between = results["seconds_between"] / sorted(turn["wall"] for turn in rounds["not watched"])[1]
    shares = sorted(
        (log["wall"] / bare["wall"] - 1 + (every - 1) * between) / every
        for log, bare in zip(rounds["log step, all of it"], rounds["not watched"], strict=True)
    )
    assert results["share_of_step_time"]["by the clock"]["median"] == pytest.approx(shares[1])
    assert "all logging at logging.every=10" in ended.stdout
    assert "loss" not in ended.stdout
