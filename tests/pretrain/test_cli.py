"""The command line as a user meets it: alone, under each launcher, and with mistakes."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext import build_model, find_documents
from pretrain.commands import parse
from pretrain.config_file import load_config
from pretrain.data.manifest import load_manifest
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.schedule import learning_rate
from tests.launch import REPOSITORY
from tests.pretrain import runs

pytestmark = pytest.mark.dist

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("SLURM_")
    }
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "pretrain", "train", "configs/demo.yaml", *runs.SMALL, *overrides]


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_alone(manifest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [f"data.manifest={manifest}", f"run.dir={folder}", "train.steps=8"]
    first = run(command(*settings))
    assert (first.returncode, first.stderr) == (0, "")
    assert "step 8/8  loss " in first.stdout
    optimizer = load_config(REPOSITORY / "configs/demo.yaml", [*runs.SMALL, *settings]).optimizer
    rates = runs.curve(folder, "train/lr")
    assert rates == pytest.approx({step: learning_rate(step - 1, 8, optimizer) for step in range(1, 9)}, rel=1e-6)
    assert sorted(runs.curve(folder, "train/loss")) == list(range(1, 9))
    for tag in (
        *("train/loss", "train/grad_norm", "train/lr", "throughput/tokens_per_second"),
        *("geometry/angle_attention/layer_01", "geometry/angle_mlp/layer_02", "geometry/resultant_length/layer_02"),
    ):
        assert runs.curve(folder, tag)[8] > 0, tag
    angle = runs.curve(folder, "geometry/angle_mlp/layer_01")
    assert sorted(angle) == [3, 4, 6, 8]  # log steps and checkpoints
    again = run(command(*settings))
    assert (again.returncode, again.stderr) == (0, "")
    assert "has all of train.steps=8; raise train.steps to go on" in again.stdout
    other = run(command(*settings, "train.steps=9", "model.num_layers=1"))
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr.startswith("error: model.num_layers=1, but ")
    next(folder.glob("checkpoints/step-00000008/__*.distcp")).unlink()
    damaged = run(command(*settings, "train.steps=9"))
    assert (damaged.returncode, damaged.stderr.count("\n")) == (2, 1)
    assert "checkpoint.on_damage=previous goes on from the one before" in damaged.stderr


AS_A_SETTING = "; settings are written section.key=value, as in train.steps=VALUE; "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "configs/demo.yaml", "--steps", "5"], f"unrecognized arguments: --steps{AS_A_SETTING}"),
        (["train", "configs/demo.yaml", "--train.steps=5"], f"unrecognized arguments: --train.steps=5{AS_A_SETTING}"),
        (["train"], "the following arguments are required: CONFIG"),
        (["plan", "configs/demo.yaml", "--gpus", "many"], "argument --gpus: many is not a number of at least 1; "),
        (["trian"], "argument command: invalid choice: 'trian'"),
    ],
)
def test_a_mistyped_command_line_is_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("--help tells what it takes")


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("separate", [False, True], ids=["whole samples", "documents"])
def test_losses_are_those_of_the_promised_samples(manifest: Path, tmp_path: Path, separate: bool) -> None:
    """With a rate of nothing the weights stay as drawn, so every loss can be computed from the samples' order alone."""
    folder = tmp_path / "run"
    data = load_manifest(manifest)
    train = ShardReader(data, "train", 32)

    def samples(seed: int) -> torch.Tensor:
        """Those of six steps, [24, 33]."""
        order = SampleOrder(train.shard_sizes, seed=seed)
        return torch.tensor([train.read(order.sample_id(draw)).tolist() for draw in range(24)])

    # Few samples of this text hold the end of a document, so not every order begins with one in a first half.
    seed = next(seed for seed in range(77, 1000) if (samples(seed)[:, 4:16] == data.eod_id).any())
    settings = [f"data.manifest={manifest}", f"run.dir={folder}", "train.steps=6", "train.precision=fp32"]
    settings += ["optimizer.lr=1e-30", "optimizer.min_lr=0", f"train.seed={seed}", "model.init_std=0.5"]
    settings += [f"data.separate_documents={separate}".lower()]
    done = run(command(*settings))
    assert done.returncode == 0, done.stderr
    config = load_config(REPOSITORY / "configs/demo.yaml", [*runs.SMALL, *settings])
    model = build_model(
        dataclasses.replace(config.model, vocab_size=data.vocab_size),
        config.parallel,
        dtype=torch.float32,
        device="cpu",
        seed=seed,
        token_counts=data.token_counts.tolist(),
    )

    def loss(rows: torch.Tensor, separate: bool) -> float:
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        documents = find_documents(tokens, data.eod_id) if separate else None
        positions = documents.position_ids if documents else torch.arange(32).expand_as(tokens)
        with torch.no_grad():
            return float(model(tokens, positions, None, labels=labels, packed_seq_params=documents).mean())

    expected, others = (
        {step: loss(rows, choice) for step, rows in enumerate(samples(seed).split(4), start=1)}
        for choice in (separate, not separate)
    )
    assert runs.curve(folder, "train/loss") == pytest.approx(expected, rel=1e-5)
    assert others != pytest.approx(expected, rel=1e-4)
    held_out = ShardReader(data, "validation", 32)
    rows = torch.tensor([held_out.read(sample).tolist() for sample in range(6)])
    validation = loss(rows, separate)
    assert runs.curve(folder, "validation/loss") == pytest.approx({6: validation}, rel=1e-5)
    assert data.tokenizer_file is not None
    decode = Tokenizer(data.tokenizer_file).decode
    text_bytes = sum(len(decode(row.numpy()).encode()) - len(decode(row[:1].numpy()).encode()) for row in rows)
    bits = validation * rows[:, 1:].numel() / text_bytes / math.log(2)
    assert runs.curve(folder, "validation/bits_per_byte") == pytest.approx({6: bits}, rel=1e-5)


def test_under_srun_as_under_torchrun(manifest: Path, tmp_path: Path) -> None:
    settings = [f"data.manifest={manifest}", "train.steps=6", "parallel.tp=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run([*torchrun, *command(*settings, f"run.dir={tmp_path / 'torchrun'}")[1:]])
    assert done.returncode == 0, done.stdout + done.stderr
    tasks = [
        subprocess.Popen(
            command(*settings, f"run.dir={tmp_path / 'srun'}"),
            cwd=REPOSITORY,
            env=clean_environment(
                SLURM_JOB_ID=str(os.getpid()),
                SLURM_STEP_ID="0",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_STEP_NODELIST="localhost",
                SLURM_PROCID=str(task),
                SLURM_LOCALID=str(task),
            ),
            start_new_session=True,
        )
        for task in range(2)
    ]
    runs.finish(tasks, tmp_path / "none")
    assert runs.curve(tmp_path / "srun", "train/loss") == runs.curve(tmp_path / "torchrun", "train/loss")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.stps=5"], "error: argument 'train.stps=5': train.stps is not a setting; did you mean train.steps?"),
        (["parallel.tp=2"], "error: 1 process(es) cannot be divided by parallel.tp=2 x parallel.pp=1;"),
        (
            ["model.num_attention_heads=3"],
            "error: model.hidden_size=32 is not divisible by model.num_attention_heads=3; change either",
        ),
        (
            ["model.backend=te"],
            "error: model.backend=te needs the package transformer-engine, which cannot be imported; install it or set",
        ),
        (["data.manifest=nowhere.json"], "error: manifest nowhere.json does not exist"),
    ],
)
def test_a_mistake_gets_one_line(overrides: list[str], line: str) -> None:
    done = run(command(*overrides))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_several_processes_tell_a_mistake_once(manifest: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = [f"data.manifest={manifest}", f"run.dir={tmp_path / 'run'}", "model.sequence_length=64"]
    processes = runs.start(settings, 2, log)
    assert [process.wait(120) for process in processes] == [2, 2]
    assert log.read_text().startswith("error: model.sequence_length=64 is longer than the shards' 32")
    assert log.read_text().count("\n") == 1


def test_a_run_that_diverges_stops_and_keeps_its_checkpoints(manifest: Path, tmp_path: Path) -> None:
    """An absurd initial scale overflows fp32: nothing broken is saved, and the run says what to change."""
    folder = tmp_path / "run"
    done = run(
        command(
            f"data.manifest={manifest}", f"run.dir={folder}", "model.init_std=1e38", "model.residual.scheme=pre_norm"
        )
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "was not finite in every step" in done.stderr
    assert not list(folder.glob("checkpoints/*"))


def test_a_folder_in_use_is_told_by_one_process(manifest: Path, tmp_path: Path) -> None:
    """All processes end, also where nothing kills them: the rank that holds no lock must not wait for one that left."""
    log, folder = tmp_path / "log", tmp_path / "run"
    with runs.locked(folder):
        processes = runs.start([f"data.manifest={manifest}", f"run.dir={folder}"], 2, log)
        assert [process.wait(120) for process in processes] == [2, 2], log.read_text()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert errors == [f"error: run.dir={folder} is in use by another run; stop it or choose another run.dir"]


def test_training_does_not_start_without_deepspeed() -> None:
    hidden = "import runpy, sys; sys.modules['deepspeed'] = None; runpy.run_module('pretrain', run_name='__main__')"
    found = run([sys.executable, "-c", hidden, *command()[3:]])
    line = "error: training needs the package deepspeed, which is not installed; run tools/setup.sh\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", line)
