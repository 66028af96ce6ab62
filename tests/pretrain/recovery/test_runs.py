"""Real runs with planted poison: what each policy makes of it, and kill -9 in the midst of it."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.checkpoint import store
from tests.pretrain import runs
from tests.pretrain.recovery import poison

pytestmark = pytest.mark.dist

STEPS, BATCH = 108, 4
POISONED = range(76 * BATCH, 100 * BATCH)
SETTINGS = [
    *("optimizer.lr=0.01", "optimizer.min_lr=0.004", "optimizer.warmup_steps=8", "spikes.window=32"),
    *("checkpoint.every=15", "validation.every=18", "validation.samples=64", "logging.every=6"),
    *("spikes.skip_before=2", "spikes.skip_after=30", f"train.steps={STEPS}"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poison")
    poison.build(folder / "clean", 2 * STEPS * BATCH)
    poison.build(folder / "poisoned", 2 * STEPS * BATCH, POISONED)
    return folder


def settings(manifest: Path, run: Path, policy: str, *more: str) -> list[str]:
    return [
        *SETTINGS,
        f"data.manifest={manifest / 'manifest.json'}",
        f"run.dir={run}",
        f"spikes.policy={policy}",
        *more,
    ]


def complete(
    arguments: list[str], log: Path, world_size: int = 1, module: Sequence[str] = ("pretrain",), status: int = 0
) -> str:
    processes = runs.start(arguments, world_size, log, module=module)
    if status:
        try:
            assert {process.wait(180) for process in processes} == {status}, log.read_text()
        finally:
            runs.kill(processes)
    else:
        runs.finish(processes, log)
    return log.read_text()


@pytest.fixture(scope="module")
def recovered(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "recovered"
    complete(
        settings(data / "poisoned", run, "rollback", "spikes.lr_factor=0.5", "spikes.lr_steps=5"), run.parent / "log"
    )
    return run


def final_loss(run: Path) -> float:
    return runs.curve(run, "validation/loss")[STEPS]


def test_rollback_ends_where_the_clean_run_does_and_log_does_not(data: Path, recovered: Path, tmp_path: Path) -> None:
    complete(settings(data / "clean", tmp_path / "clean", "rollback"), tmp_path / "clean.log")
    complete(settings(data / "poisoned", tmp_path / "log", "log"), tmp_path / "log.log")
    clean = final_loss(tmp_path / "clean")
    assert not (tmp_path / "clean" / "spikes").exists(), "a false alarm"
    assert abs(final_loss(recovered) - clean) < 0.05
    assert final_loss(tmp_path / "log") > clean + 0.3


def test_the_run_tells_of_its_rollback(recovered: Path) -> None:
    """One spike, one report, curves that run once over every step, a marker, a lower rate for a while."""
    (path,) = (recovered / "spikes").iterdir()
    report = json.loads(path.read_text())
    assert report["rollback"] == {"at": 77, "to": 75, "first": 300, "count": (1 + 1 + 30) * BATCH}
    assert report["signals"]["loss"]["score"] > 10
    assert {sample["draw"] for sample in report["samples"]} <= set(POISONED)
    assert all(sample["dataset"] == "poisoned" for sample in report["samples"])
    assert {layer["quantity"] for layer in report["layers"]} & {"gradient", "angle_attention", "angle_mlp"}
    assert report["layers"][0]["score"] > 3, report["layers"]
    assert list(runs.curve(recovered, "train/loss")) == list(range(1, STEPS + 1))
    assert runs.curve(recovered, "events/spike")[77] == pytest.approx(report["signals"]["loss"]["value"], rel=1e-4)
    rates = runs.curve(recovered, "train/lr")
    assert rates[76] < 0.6 * rates[75]
    assert rates[83] > 1.8 * rates[82]
    events = EventAccumulator(str(recovered / "tensorboard"))
    events.Reload()
    assert "events/spike_report/text_summary" in events.Tags()["tensors"]
    memory = store.read_record(recovered / "checkpoints" / f"step-{STEPS:08d}")["state"]["callbacks"]["spikes"]
    assert memory["rollbacks"] == [report["rollback"]]


def test_a_run_killed_while_it_recovers_goes_on_bit_for_bit(data: Path, recovered: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "killed", tmp_path / "log"
    arguments = settings(data / "poisoned", run, "rollback", "spikes.lr_factor=0.5", "spikes.lr_steps=5")
    log.touch()
    for sign in ("step 72/", "went back to step 75", "step 78/"):
        before = log.read_text().count(sign)
        processes = runs.start(arguments, 1, log)
        deadline = time.monotonic() + 90
        while log.read_text().count(sign) == before and processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        runs.kill(processes)
    said = complete(arguments, log)
    for tag in ("train/loss", "train/grad_norm", "train/lr", "validation/loss", "events/spike"):
        assert runs.curve(run, tag) == runs.curve(recovered, tag), tag
    assert said.count("went back to step 75") == 1, said
    assert len(list((run / "spikes").iterdir())) == 1


def test_an_infinite_gradient_on_one_rank_takes_all_back(data: Path, tmp_path: Path) -> None:
    """Of two data-parallel ranks; skipping the step, as the other policies do, is told too."""
    faulty = ("tests.pretrain.recovery.faulty_run", "1", str(41 * BATCH))
    more = ["train.steps=60", "validation.every=0", "spikes.skip_after=0"]
    for policy in ("rollback", "log"):
        run = tmp_path / policy
        said = complete(settings(data / "clean", run, policy, *more), tmp_path / f"{policy}.log", 2, faulty)
        norms = runs.curve(run, "train/grad_norm")
        assert list(norms) == list(range(1, 61))
        (path,) = (run / "spikes").iterdir()
        report = json.loads(path.read_text())
        assert report["step"] == 42
        assert report["signals"]["grad_norm"] == {"value": None, "median": report["signals"]["grad_norm"]["median"]} | {
            "score": None
        }
        spoiled = [layer["part"] for layer in report["layers"] if layer["value"] is None]
        assert spoiled == ["embedding"]
        if policy == "rollback":
            assert max(norms.values()) < 1e3
            assert report["rollback"] == {"at": 42, "to": 30, "first": 39 * BATCH, "count": 3 * BATCH}
        else:
            assert norms[42] == float("inf")
            assert "the update was skipped" in said


def test_parts_of_a_model_go_back_together(data: Path, tmp_path: Path) -> None:
    """The gradient of one tensor-parallel part, or of one stage, is infinite: all go on as one process would."""
    more = ["train.precision=fp32", "train.steps=20", "checkpoint.every=6", "logging.every=4", "validation.every=0"]
    curves = {}
    for name, layout in (("one", []), ("tp", ["parallel.tp=2"]), ("pp", ["parallel.pp=2"])):
        run, world_size = tmp_path / name, 2 if layout else 1
        faulty = ("tests.pretrain.recovery.faulty_run", str(world_size - 1), str(15 * BATCH))
        complete(
            settings(data / "clean", run, "rollback", *more, *layout), tmp_path / f"{name}.log", world_size, faulty
        )
        (path,) = (run / "spikes").iterdir()
        rollback = json.loads(path.read_text())["rollback"]
        assert rollback == {"at": 16, "to": 12, "first": 13 * BATCH, "count": 33 * BATCH}
        curves[name] = [runs.curve(run, tag) for tag in ("train/loss", "train/grad_norm")]
        assert list(curves[name][0]) == list(range(1, 21))
    for name in ("tp", "pp"):
        for found, expected in zip(curves[name], curves["one"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4), name


def test_checkpoints_from_within_a_spike_are_none_to_go_back_to(data: Path, tmp_path: Path) -> None:
    """It is acted on at its third step, when its first ones are saved; they are removed and saved anew."""
    more = ["spikes.act=1e9", "checkpoint.every=1", "train.steps=82", "validation.every=0"]
    said = complete(settings(data / "poisoned", tmp_path / "run", "rollback", *more), tmp_path / "log")
    (path,) = (tmp_path / "run" / "spikes").glob("rollback-*")
    report = json.loads(path.read_text())
    assert (report["step"], report["onset"], report["rollback"]["to"]) == (79, 77, 76)
    assert said.count("saved to") == 82 + 2
    assert "warning" not in said


def test_rollbacks_without_end_end_the_run(data: Path, tmp_path: Path) -> None:
    more = ["spikes.skip_after=0", "spikes.max_rollbacks=2", "validation.every=0"]
    said = complete(settings(data / "poisoned", tmp_path / "run", "rollback", *more), tmp_path / "log", status=2)
    assert said.count("the run went back to step 75") == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "spikes.max_rollbacks=2 in 2000 steps" in errors[0]
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["pre_norm", "geonorm"])
@pytest.mark.parametrize("seed", [1234])
def test_both_schemes_survive(tmp_path: Path, scheme: str, seed: int) -> None:
    """Longer, with the settings' own window."""
    steps, poisoned = 360, range(250 * BATCH, 330 * BATCH)
    poison.build(tmp_path / "clean", 2 * steps * BATCH)
    poison.build(tmp_path / "poisoned", 2 * steps * BATCH, poisoned)
    more = [f"model.residual.scheme={scheme}", f"train.steps={steps}", "spikes.window=128", "checkpoint.every=20"]
    more += [f"train.seed={seed}", "spikes.skip_before=10", "spikes.skip_after=100"]
    losses = {}
    for name, policy in (
        ("clean", "rollback"),
        ("poisoned", "rollback"),
        ("poisoned", "log"),
        ("poisoned", "skip_step"),
    ):
        run = tmp_path / f"{name}-{policy}"
        complete(settings(tmp_path / name, run, policy, *more), tmp_path / f"{run.name}.log")
        losses[run.name] = runs.curve(run, "validation/loss")[steps]
    print(scheme, losses)
    assert abs(losses["poisoned-rollback"] - losses["clean-rollback"]) < 0.05
    assert losses["poisoned-log"] > losses["clean-rollback"] + 0.2
