"""tools/demo.sh: its arguments, its table, and in a short form the whole of it."""

import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils.tensorboard.writer import SummaryWriter

from pretrain.data.manifest import Manifest
from pretrain.errors import UserError
from tools.demo_report import CLEARLY_BELOW, check, print_table, read_outcome

ROOT = Path(__file__).parents[2]


def write_run(folder: Path, train: list[float], validation: list[float]) -> Path:
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step, loss in enumerate(train, start=1):
            writer.add_scalar("train/loss", loss, step)
        for step, loss in enumerate(validation, start=1):
            writer.add_scalar("validation/loss", loss, step)
    return folder


def demo(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", ROOT / "tools" / "demo.sh", *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_the_last_losses_are_read(tmp_path: Path) -> None:
    outcome = read_outcome(write_run(tmp_path / "run", [4.0, 3.0, 2.5], [3.5, 2.75]))
    assert (outcome.step, outcome.train_loss, outcome.validation_loss) == (3, 2.5, 2.75)


def test_a_run_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="validation/loss"):
        read_outcome(write_run(tmp_path / "run", [4.0], []))


def test_the_table_has_both_runs_and_the_entropy(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, [1.25], [loss]) for name, loss in (("a", 0.5), ("b", 0.625))]
    print_table(manifest.directory, runs)
    entropy = f"{manifest.split('validation').unigram_entropy:.4f}"
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:-1]]
    assert rows == [
        [runs[0].as_posix(), "1", "1.2500", "0.5000", entropy],
        [runs[1].as_posix(), "1", "1.2500", "0.6250", entropy],
    ]


@pytest.mark.parametrize("loss", [1.01 * CLEARLY_BELOW, float("nan")])
def test_a_run_that_learned_nothing_fails(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float
) -> None:
    entropy = manifest.split("validation").unigram_entropy
    run = write_run(tmp_path / "run", [1.0], [loss * entropy])
    with pytest.raises(SystemExit) as stopped:
        print_table(manifest.directory, [run])
    assert stopped.value.code == 1
    assert (
        f"not clearly below the unigram entropy (under {CLEARLY_BELOW * entropy:.4f}): {run}" in capsys.readouterr().err
    )


def test_settings_are_checked_before_the_data(tmp_path: Path) -> None:
    places = [f"run.dir={tmp_path}", f"data.manifest={tmp_path}/absent"]
    check(ROOT / "configs" / "demo.yaml", [*places, "parallel.tp=2"], processes=2)
    with pytest.raises(UserError, match=r"parallel\.tp=3"):
        check(ROOT / "configs" / "demo.yaml", [*places, "parallel.tp=3"], processes=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text"], "--text needs at least one file or folder"),
        (["--text", "--out", "x"], "--text needs at least one file or folder"),
        (["--out"], "--out needs a folder"),
        (["--text", "/no/such/file"], "--text /no/such/file does not exist"),
        (["--fast"], "--fast is neither --text PATH..., --out DIR nor section.key=value"),
        (["run.dir=elsewhere"], "run.dir is what the demo itself sets"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = demo(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_help_is_the_head_of_the_script() -> None:
    result = demo("--help")
    assert result.returncode == 0
    assert "bash tools/demo.sh [--text PATH...] [--out DIR] [section.key=value ...]" in result.stdout


@pytest.mark.dist
def test_the_whole_demo_in_a_short_form(tmp_path: Path) -> None:
    text = Path(sysconfig.get_path("stdlib"), "asyncio")
    small = ("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.sequence_length=64")
    arguments = ("--text", str(text), "--out", str(tmp_path), *small, "train.steps=40", "optimizer.lr=1e-2")
    result = demo(*arguments, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        Path(line.split()[0]).name: line.split()[1:]
        for line in result.stdout.splitlines()
        if str(tmp_path) in line[:99]
    }
    for scheme in ("geonorm", "pre_norm"):
        steps, train_loss, validation_loss, entropy = rows[scheme]
        assert steps == "40"
        assert float(train_loss) < float(entropy)
        assert float(validation_loss) < CLEARLY_BELOW * float(entropy)
