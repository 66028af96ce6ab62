"""``python -m pretrain inspect`` on real runs: what it prints is what the engine and TensorBoard said."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import with_defaults
from pretrain.checkpoint import store
from pretrain.checkpoint.record import RECORD
from pretrain.config import Config
from pretrain.data.manifest import load_manifest
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import UserError
from pretrain.inspect_checkpoint import (
    Inspection,
    Reading,
    described,
    find_checkpoint,
    load_model,
    read,
    read_samples,
    recorded_config,
    run_inspection,
)
from pretrain.monitor.geometry import CURVES, columns
from pretrain.monitor.geometry_table import geometry_table
from tests.launch import REPOSITORY
from tests.pretrain import runs
from tests.pretrain.checkpoint.small import reseal

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("single_process")]

TEXT = REPOSITORY / "LICENSE"


@pytest.fixture(scope="module")
def run(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in fp32 at a rate of nothing, so that the saved weights are those of every log step."""
    folder = tmp_path_factory.mktemp("runs") / "proj"
    settings = [f"data.manifest={manifest}", f"run.dir={folder}", "train.steps=4", "train.precision=fp32"]
    settings += ["optimizer.lr=1e-30", "optimizer.min_lr=0", "model.residual.scheme=proj", "model.residual.clamp=0.002"]
    log = folder.parent / "log"
    runs.finish(runs.start([*settings, "parallel.tp=2"], 2, log), log)
    return folder


def opened(run: Path) -> tuple[Config, dict[str, Any], torch.nn.Module]:
    checkpoint = find_checkpoint(run)
    record = store.read_record(checkpoint)
    config = recorded_config(checkpoint, record)
    # As a run on a GPU records it.
    config = config.model_copy(update={"model": dataclasses.replace(config.model, kernels="triton")})
    return config, record, load_model(config, checkpoint, record["vocab_size"], torch.device("cpu"))


def test_a_checkpoint_from_before_the_first_evaluation(run: Path) -> None:
    """Its run remembers from where it will be known, but no loss."""
    config, record, _ = opened(run)
    for known in ({}, {"validation": {"step": 0}}, {"validation": {"step": 0, "loss": None}}):
        record["state"]["callbacks"] = known
        assert "validation    none so far" in described({"checkpoint": "", "parameters": 1}, record, config)


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pretrain", "inspect", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_equals_the_validation_and_every_curve_of_the_run(run: Path, manifest: Path) -> None:
    config, _, module = opened(run)
    data = load_manifest(manifest)

    def reading(reader: ShardReader, samples: list[int]) -> Reading:
        return read(module, torch.tensor([reader.read(sample).tolist() for sample in samples]), 2)

    held_out = reading(ShardReader(data, "validation", 32), list(range(6)))
    assert held_out.loss == pytest.approx(runs.curve(run, "validation/loss")[4], rel=1e-6)
    train = ShardReader(data, "train", 32)
    order = SampleOrder(train.shard_sizes, config.train.seed)
    batch = reading(train, [order.sample_id(draw) for draw in range(12, 16)])
    assert batch.loss == pytest.approx(runs.curve(run, "train/loss")[4], rel=1e-6)
    seen = set()
    for curve in CURVES:
        if curve.name == "radius":  # constant on the sphere
            continue
        for name, values in columns(curve, batch.geometry):
            for layer, value in enumerate(values.tolist(), start=1):
                point = runs.curve(run, f"geometry/{name}/layer_{layer:02d}")[4]
                # The drift is fp32's rounding itself.
                assert point == pytest.approx(value, rel=1e-4, abs=1e-6 if "drift" in name else 1e-9), (name, layer)
                seen.add(name)
    assert {"angle_attention", "alpha_mlp", "clamped_share_mlp", "resultant_length"} <= seen
    assert 0 < batch.geometry.clamped_share.mean() < 1


def test_the_command_prints_the_loss_and_the_table(run: Path, manifest: Path) -> None:
    done = inspect(str(run), "--text", str(TEXT), "--sequences", "5")
    assert (done.returncode, done.stderr) == (0, "")
    config, _, module = opened(run)
    samples = read_samples(TEXT, Tokenizer(load_manifest(manifest).tokenizer_file), 32, 5)
    assert samples.rows.shape == (5, 33)
    reading = read(module, samples.rows, 2)
    loss, bits = re.findall(r"loss +([\d.]+) nats per token, ([\d.]+) bits per byte", done.stdout)[0]
    assert float(loss) == pytest.approx(reading.loss, abs=1e-4)
    assert float(bits) == pytest.approx(reading.loss * 160 / math.log(2) / samples.bytes, abs=1e-4)
    table = geometry_table(reading.geometry, with_defaults(config.model.residual))
    assert "\n".join(table) in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100 + len(str(run))
    for line in (
        "step          4 of 4, 512 tokens, ",
        "scheme        proj, decay sqrt",
        "saved in      tp 2, pp 1, dp 1",
    ):
        assert line in done.stdout


def test_the_bytes_are_those_of_the_predicted_text(manifest: Path) -> None:
    data = load_manifest(manifest)
    text = TEXT.read_bytes()
    tokenizer = Tokenizer(data.tokenizer_file)
    samples = read_samples(TEXT, tokenizer, 32, 4)
    flat = torch.cat([samples.rows[:, :-1].flatten(), samples.rows[-1, -1:]])
    first = len(tokenizer.decode(flat[:1].numpy()).encode())
    assert tokenizer.decode(flat[1:].numpy()).encode().strip() == text[first : first + samples.bytes].strip()


def test_json_holds_the_same(run: Path) -> None:
    done = inspect(str(run / "checkpoints" / "step-00000003"), "--json", "--text", str(TEXT), "--sequences", "2")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["record"]["state"]["step"] == 3
    assert found["parameters"] == sum(p.numel() for p in opened(run)[2].parameters()) - 2 * 40 * 32 - 40
    assert [(row["layer"], row["sublayer"]) for row in found["geometry"]] == [
        (layer, sublayer) for layer in (1, 2) for sublayer in ("attention", "mlp")
    ]
    assert found["geometry"][2]["alpha"] == pytest.approx(3**-0.5, rel=1e-6)
    assert found["loss"] > 0


def test_a_configuration_is_compared(run: Path, tmp_path: Path) -> None:
    """The run's own file has no differences; the demo has those that the command line made."""
    same = inspect(str(run), "--json", "--config", str(run / "config.yaml"))
    assert json.loads(same.stdout)["differences"] == []
    other = tmp_path / "other.yaml"
    other.write_text((run / "config.yaml").read_text().replace("steps: 4", "steps: 5").replace("tp: 2", "tp: 1"))
    done = inspect(str(run), "--config", str(other))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"settings      2 are others in {other}:\n" in done.stdout
    assert "              train.steps: 4 -> 5\n              parallel.tp: 2 -> 1\n" in done.stdout
    assert f"validation    loss {runs.curve(run, 'validation/loss')[4]:.4f} at step 4" in done.stdout
    other.write_text((run / "config.yaml").read_text().replace("scheme: proj", "scheme: prof"))
    with pytest.raises(UserError, match=r"model\.residual\.scheme=prof: unknown; did you mean proj"):
        run_inspection(Inspection(run, None, 64, None, as_json=False, config=other))


def ask(path: Path, text: Path | None = TEXT, manifest: Path | None = None) -> None:
    run_inspection(Inspection(path=path, text=text, sequences=4, manifest=manifest, as_json=False))


def test_a_moved_manifest_is_named(run: Path, manifest: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    record = find_checkpoint(copy) / RECORD
    settings = json.loads(record.read_text().replace(str(manifest), "/gone/manifest.json"))["config"]
    reseal(record.parent, config=settings)
    with pytest.raises(UserError, match=r"data.manifest=/gone/manifest.json does not exist here; .*--manifest PATH"):
        ask(copy)
    moved = Path(shutil.copytree(manifest.parent, tmp_path / "moved")) / "manifest.json"
    (moved.parent / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"tokenizer .* does not exist"):
        ask(copy, manifest=moved)
    shutil.copy(manifest.parent / "tokenizer.model", moved.parent)
    description = json.loads(moved.read_text())
    moved.write_text(json.dumps(description | {"name": "another"}))
    with pytest.raises(UserError, match="but the model was trained on"):
        ask(copy, manifest=moved)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"A few words.", r"has \d+ tokens, but one sequence of the model takes 33"),
        (b"caf\xe9 " * 100, "is not UTF-8 text: .* at byte 3"),
    ],
)
def test_a_text_that_will_not_do(run: Path, tmp_path: Path, content: bytes | None, complaint: str) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        ask(run, text)


def test_what_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        ask(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is no folder"):
        ask(tmp_path / ("too long" * 99))
    with pytest.raises(UserError, match="holds no checkpoint"):
        ask(tmp_path)
    damaged = Path(shutil.copytree(find_checkpoint(run), tmp_path / "step-00000004"))
    next(damaged.glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="is damaged"):
        ask(damaged)


def test_settings_of_another_version(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(find_checkpoint(run), tmp_path / "step-00000004"))
    record = json.loads((copy / RECORD).read_text())
    record["config"]["model"]["unheard_of"] = 1
    reseal(copy, config=record["config"])
    with pytest.raises(UserError, match=r"config.model.unheard_of: .*; use the version that saved it"):
        ask(copy, None)
    del record["config"]["model"]["unheard_of"]
    record["config"]["model"]["residual"]["scheme"] = "my_own"
    reseal(copy, config=record["config"])
    with pytest.raises(UserError, match=r"unknown residual scheme 'my_own'; .*; use the version that saved it"):
        ask(copy, None)
