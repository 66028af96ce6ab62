"""A plan against the real model, DeepSpeed's real buffers, and arithmetic by hand."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from megatron_ext import build_model
from megatron_ext.flops import flops_per_token
from megatron_ext.pretended import pretended_rank
from pretrain.config import CheckpointSettings, Config
from pretrain.config_file import load_config
from pretrain.data.manifest import load_manifest
from pretrain.errors import UserError
from pretrain.hardware import GPUS
from pretrain.plan.command import PlanRequest, make_plan
from pretrain.plan.disk import checkpoint_disk
from pretrain.plan.layouts import Machines, changes, measured, rate
from pretrain.plan.memory import USABLE, persistent_bytes, rank_memory
from pretrain.plan.page import page
from pretrain.plan.plan import Plan
from pretrain.plan.timing import step_time
from pretrain.plan.warnings import warnings_of
from tests.launch import REPOSITORY, launch

CONFIGS = REPOSITORY / "configs"
RUNS = sorted(path for path in CONFIGS.rglob("*.yaml") if "run" in yaml.safe_load(path.read_text(encoding="utf-8")))
VOCAB = ["model.vocab_size=32000"]


def config_of(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / name, [*VOCAB, *overrides])


def plan(name: str, *overrides: str, gpus: int | None = None, gpu: str = "h100") -> Plan:
    return make_plan(config_of(name, *overrides), PlanRequest(gpus, gpu))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_configuration_is_planned(path: Path) -> None:
    config = load_config(path, [] if "vocab_size" in path.read_text() else VOCAB)
    ranks = config.parallel.tp * config.parallel.pp
    gpus = ranks if config.train.global_batch == config.train.micro_batch else 2 * ranks
    made = make_plan(config, PlanRequest(gpus))
    assert made.fits
    expected = ["tokens a GPU", "optimizer.lr", *(["model.output_bias"] if config.data.mode == "stream" else [])]
    assert not [line for line in made.warnings if not any(words in line for words in expected)]
    told = made.to_dict()
    assert json.loads(json.dumps(told)) == told
    kinds = dict(told["memory_bytes"])
    assert kinds.pop("total") == sum(kinds.values())
    parts = dict(told["step_seconds"])
    parts.pop("mfu")
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    text = page(made)
    assert f"{made.parameters:,} parameters" in text
    assert max(map(len, text.splitlines())) <= 150
    layout = config.parallel
    with pretended_rank(dataclasses.replace(layout, pp=1)):
        model = dataclasses.replace(config.model, vocab_size=made.vocab_size)
        whole = build_model(model, layout, dtype=torch.bfloat16, device="meta", seed=0, token_counts=None)
    assert sum(parameter.numel() for parameter in whole.parameters()) == made.parameters_of_ranks[0]
    assert made.parameters == sum(
        parameter.numel() * (layout.tp if getattr(parameter, "tensor_model_parallel", False) else 1)
        for parameter in whole.parameters()
    )


def test_the_manifest_tells_vocabulary_and_epochs(manifest: Path) -> None:
    data = load_manifest(manifest)
    config = load_config(CONFIGS / "demo.yaml", [f"data.manifest={manifest}", "model.sequence_length=32"])
    made = make_plan(config, PlanRequest(1))
    assert made.vocab_size == data.vocab_size
    assert made.epoch_tokens == data.split("train").samples * 32
    assert "epochs of the data" in page(made)
    with pytest.raises(UserError, match=r"model\.sequence_length=64 is longer than the shards' 32"):
        make_plan(
            load_config(CONFIGS / "demo.yaml", [f"data.manifest={manifest}", "model.sequence_length=64"]),
            PlanRequest(1),
        )


def test_without_data_the_vocabulary_is_asked_for() -> None:
    config = load_config(CONFIGS / "demo.yaml", ["data.manifest=nowhere/manifest.json"])
    with pytest.raises(UserError, match=r"^nowhere/manifest\.json cannot be read here.*model\.vocab_size=N$"):
        make_plan(config, PlanRequest(1))


def test_bad_settings_are_refused_as_by_a_run() -> None:
    with pytest.raises(UserError, match=r"^model\.num_attention_heads=16 is not divisible by parallel\.tp=3;"):
        plan("geonorm_1p3b.yaml", "parallel.tp=3")
    with pytest.raises(
        UserError, match=r"train\.global_batch=256 is not divisible by .*; this would work: train"
    ) as bad:
        plan("geonorm_1p3b.yaml", "train.micro_batch=64", gpus=8)
    assert "\n" not in str(bad.value)


@pytest.mark.dist
def test_deepspeed_holds_what_is_planned() -> None:
    (output, _) = launch("tests.pretrain.plan.state_worker", 2)
    found = json.loads(output.splitlines()[-1])
    parameters = found.pop("parameters")
    assert len(found) == 8
    for case, held in found.items():
        precision, stage = case.split()
        weights, gradients, optimizer = persistent_bytes(parameters, 2, int(stage), precision)
        if case == "fp32 1":
            gradients //= 2  # whole during the backward pass, as planned; once reduced, each rank has kept its part
        assert held == pytest.approx([weights, gradients, optimizer], rel=2e-3), case


def test_zero_divides_more_with_every_stage() -> None:
    sizes = [sum(persistent_bytes(1000, 4, stage, "bf16")) for stage in range(4)]
    assert sizes == [18_000, 2000 + 4000 + 3000, 2000 + 1000 + 3000, 500 + 1000 + 3000]
    assert sum(persistent_bytes(1000, 1, 1, "fp32")) == 20_000


def test_what_zero_moves_and_buffers_is_counted() -> None:
    """A model of 1.45 B parameters on 8 GPUs in one machine, in bf16."""
    gpu, found = GPUS["h100"], {}
    for stage in range(4):
        config = config_of("geonorm_1p3b.yaml", f"zero.stage={stage}", "parallel.tp=1", "parallel.sp=false")
        parts = measured(config, 32000)
        memory = rank_memory(config, parts, 8, 0)
        held = memory.weights // 2 * (8 if stage == 3 else 1)
        found[stage] = (memory.buffers, step_time(config, parts, 32000, 8, gpu, 0.4).data * gpu.link_gb * 1e9)
    micro_batches = config.train.global_batch // (config.train.micro_batch * 8)
    assert found[2][0] == 50_000_000 * 6
    assert found[3][0] == 50_000_000 * 6 + 200_000_000 * 2
    sent = [traffic / (7 / 8 * held) for _, traffic in found.values()]
    assert sent == pytest.approx([8, 10, 8 * micro_batches + 2, (4 + 2 * 2) * micro_batches], rel=1e-3)
    made = plan("geonorm_1p3b.yaml", "zero.offload_optimizer=true")
    assert made.layout.memory.optimizer == 0
    assert "are in host memory" in page(made)
    (told,) = (line for line in made.warnings if "offload" in line)
    assert f"{16 * made.parameters_of_ranks[0] / made.dp / 2**30:.1f} GiB of it a rank" in told


def test_early_stages_hold_several_micro_batches() -> None:
    config = config_of("geonorm_1p3b.yaml", "parallel.pp=4", "train.micro_batch=1")
    parts = measured(config, 32000)
    memories = [rank_memory(config, parts, 4, pp_rank) for pp_rank in range(4)]
    own = 6 * parts.layer_saved
    assert [memory.activations for memory in memories] == [4 * (own + parts.embedding_saved), 3 * own, 2 * own, own]
    assert memories[3].work == parts.head_work > memories[2].work
    virtual = config_of("geonorm_1p3b.yaml", "parallel.pp=4", "parallel.vpp=3", "train.micro_batch=1")
    # 2 (pp - rank - 1) + (vpp - 1) pp + 1 parts of a third of the layers.
    saved = rank_memory(virtual, parts, 4, 3).activations
    assert saved == pytest.approx(9 / 3 * own)
    short = config_of("geonorm_1p3b.yaml", "parallel.pp=4", "train.global_batch=8", "train.micro_batch=1")
    assert rank_memory(short, parts, 4, 0).activations == 2 * (own + parts.embedding_saved)


def test_time_by_hand() -> None:
    gpu = GPUS["h100"]
    config = config_of("geonorm_1p3b.yaml")
    parts = measured(config, 32000)
    alone = step_time(config, parts, 32000, 1, gpu, 0.5)
    # 6 x 1.28 B parameters in matrices and 12 x 24 x 2048 x 4096 for attention, a token.
    tokens = 256 * 4096
    assert alone.total == alone.model == pytest.approx(tokens * (6 * 1.280e9 + 2.416e9) / (0.5 * 989e12), rel=0.01)
    assert alone.mfu == pytest.approx(0.5)
    again = step_time(config_of("geonorm_1p3b.yaml", "model.recompute=full"), parts, 32000, 1, gpu, 0.5)
    assert again.model + again.recompute == pytest.approx(4 / 3 * alone.model, rel=0.03)
    assert again.mfu == pytest.approx(0.5 * 3 / 4, rel=0.03)
    piped = step_time(config_of("geonorm_1p3b.yaml", "parallel.pp=4"), parts, 32000, 4, gpu, 0.5)
    assert piped.model == pytest.approx(alone.model / 4)
    interleaved = step_time(
        config_of("geonorm_1p3b.yaml", "parallel.pp=4", "parallel.vpp=3"), parts, 32000, 4, gpu, 0.5
    )
    # One slot of waiting at the ends instead of three.
    assert interleaved.bubble + interleaved.model == pytest.approx(129 / 131 * (piped.bubble + piped.model))
    halves = step_time(config_of("geonorm_1p3b.yaml", "model.recompute=selective"), parts, 32000, 1, gpu, 0.5)
    flops = flops_per_token(dataclasses.replace(config.model, vocab_size=32000))
    assert halves.recompute == pytest.approx(tokens * flops.mlp / 3 / (0.5 * 989e12))
    shared = step_time(config_of("geonorm_1p3b.yaml", "parallel.cp=4"), parts, 32000, 4, gpu, 0.5)
    assert shared.model == pytest.approx(alone.model / 4)
    # In every forward and backward pass a rank sends 3/4 of keys and values, or of their gradients.
    key_value = 2 * config.model.hidden_size * 2 * tokens
    assert shared.context == pytest.approx(config.model.num_layers * 2 * 3 / 4 * key_value / (gpu.link_gb * 1e9))
    # 3 of 128 + 3 slots, and the head on the last stage alone: 0.393 of 8.6 GFLOPs a token.
    head = 6 * 2048 * 32000 / (tokens and alone.model / tokens * 0.5 * 989e12)
    assert piped.bubble / piped.model == pytest.approx((131 / 128) * (1 - head + 4 * head) - 1, rel=0.01)
    wide = step_time(config_of("geonorm_1p3b.yaml"), parts, 32000, 16, gpu, 0.5)
    held = parts.embedding.held + 24 * parts.layer.held + parts.head.held
    # Two machines: the ring uses their eight adapters.
    assert wide.data == pytest.approx(15 / 16 * held * 10 / 200e9)
    both = config_of("geonorm_1p3b.yaml", "parallel.tp=8")
    eighth = measured(both, 32000)
    held = eighth.embedding.held + 24 * eighth.layer.held + eighth.head.held
    # A ring of one GPU a machine: one adapter; tensor parallelism stays within.
    assert step_time(both, eighth, 32000, 16, gpu, 0.5).data == pytest.approx(1 / 2 * held * 10 / 25e9)
    tensor = step_time(config_of("geonorm_1p3b.yaml", "parallel.tp=2"), parts, 32000, 2, gpu, 0.5).tensor
    assert tensor == pytest.approx(128 * 24 * 4 * 2 * 4096 * 2048 * 2 / 450e9)


def test_what_does_not_fit_gets_a_layout_that_does() -> None:
    made = plan("geonorm_7b.yaml", "parallel.tp=1", "parallel.sp=false", "train.micro_batch=4", gpus=64)
    assert not made.fits
    assert made.warnings[0].startswith("does not fit: ")
    assert made.better is not None
    machines = made.machines
    assert made.better.memory.total <= machines.usable_bytes
    text = page(made)
    assert "DOES NOT FIT" in text
    assert f"better:  {' '.join(changes(made.config, made.better.config))}" in text
    # The proposal, planned, is what was promised, and has nothing better beside it.
    again = plan(
        "geonorm_7b.yaml",
        "parallel.tp=1",
        "parallel.sp=false",
        "train.micro_batch=4",
        *changes(made.config, made.better.config),
        gpus=64,
    )
    assert again.layout.memory == made.better.memory
    assert again.layout.time == made.better.time
    assert again.better is None


def test_a_proposal_uses_all_ways_of_dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    one_sample = [
        *("model.num_layers=2", "model.hidden_size=512", "model.num_attention_heads=2", "model.ffn_hidden_size=1024"),
        *("model.sequence_length=65536", "train.micro_batch=1", "train.global_batch=1"),
    ]  # for more ranks than there are heads and layers
    with pytest.raises(UserError, match=r"; this would work: .*parallel\.cp=\d"):
        plan("geonorm_125m.yaml", *one_sample, gpus=8)
    assert plan("geonorm_125m.yaml", *one_sample, "parallel.cp=8", gpus=8).fits
    undivided = [
        *("model.num_layers=3", "model.hidden_size=1536", "model.num_attention_heads=3", "model.ffn_hidden_size=4099"),
        *("train.micro_batch=1", "train.global_batch=8", "model.recompute=full"),
    ]  # neither tp nor pp can be a power of two
    needed = plan("geonorm_125m.yaml", *undivided, gpus=8).layout.memory.total
    small = dataclasses.replace(GPUS["h100"], name="small", memory_gib=0.97 * needed / 2**30 / USABLE)
    monkeypatch.setitem(GPUS, "small", small)  # type: ignore[arg-type]
    divided = plan("geonorm_125m.yaml", *undivided, gpus=8, gpu="small")
    assert divided.better is not None
    assert "zero.stage" in [change.partition("=")[0] for change in changes(divided.config, divided.better.config)]


def test_a_proposal_does_not_starve_the_gpu() -> None:
    """Where the times are the same, the smallest micro batch would have the most memory to spare."""
    made = plan("geonorm_125m.yaml", "train.micro_batch=512", gpus=1, gpu="3090")
    assert made.better is not None
    assert changes(made.config, made.better.config) == ["train.micro_batch=2"]


def test_where_nothing_fits_it_says_so() -> None:
    made = plan("geonorm_7b.yaml", "parallel.tp=1", "parallel.sp=false", gpus=1, gpu="4090")
    assert made.better is None
    assert "better:  no layout on these GPUs fits" in page(made)


@pytest.mark.parametrize(
    ("overrides", "gpus", "words"),
    [
        (["parallel.pp=8", "train.global_batch=32"], 16, "pipeline stages wait 47% of a step"),
        (["parallel.tp=16", "parallel.sp=true"], 16, "parallel.tp=16 spans machines of 8 h100"),
        (["parallel.tp=8", "train.micro_batch=1"], 8, "a micro batch has 512 tokens a GPU"),
        (["train.precision=fp32"], 8, "train.precision=fp32: the times are bf16's"),
        (["optimizer.lr=0.01"], 8, "optimizer.lr=0.01 is 22 times the recipe's 0.00045 for geonorm at this width"),
        (["model.output_bias=none"], 8, "model.output_bias=none with the scheme geonorm"),
    ],
)
def test_warnings(overrides: list[str], gpus: int, words: str) -> None:
    def warned(*overrides: str, gpus: int) -> list[str]:
        config, machines = config_of("geonorm_1p3b.yaml", *overrides), Machines(gpus, GPUS["h100"], 0.4)
        return warnings_of(rate(config, measured(config, 32000), 32000, machines), machines)

    assert not warned(gpus=8)
    assert any(line.startswith(words) for line in warned(*overrides, gpus=gpus))


@pytest.mark.parametrize(
    ("settings", "saved", "kept"),
    [
        (CheckpointSettings(every=1000), 25, 25),
        (CheckpointSettings(every=999), 26, 26),
        (CheckpointSettings(every=0), 1, 1),
        (CheckpointSettings(every=1000, keep_last=2), 25, 3),
        (CheckpointSettings(every=1000, keep_last=2, keep_every=10_000, keep_best=True), 25, 6),
        (CheckpointSettings(every=1000, keep_last=100), 25, 25),
    ],
)
def test_disk(settings: CheckpointSettings, saved: int, kept: int) -> None:
    disk = checkpoint_disk(config_of("geonorm_1p3b.yaml").model_copy(update={"checkpoint": settings}), 10)
    assert (disk.each, disk.saved, disk.kept, disk.total) == (120, saved, kept, 120 * kept)


def test_the_table_of_gpus() -> None:
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 10 < gpu.bf16_tflops < 5000
        assert 10 < gpu.memory_gib < 400
        assert gpu.source


def test_the_command_line() -> None:
    command = [sys.executable, "-m", "pretrain", "plan", "configs/demo.yaml", "model.vocab_size=4096"]
    done = subprocess.run(
        [*command, "--gpus", "1", "--gpu", "l40s", "train.steps=200", "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["gpu"], told["gpus"], told["run_tokens"]) == ("l40s", 1, 200 * 8 * 256)


def test_a_ramp_of_the_batch_is_counted() -> None:
    """Half of the ramp's samples in batches of 64, half of 128; every step costs its own time."""
    ramp = ["train.rampup.start=64", "train.rampup.increment=64", "train.rampup.samples=6400", "train.steps=1000"]
    with_ramp = ["train.global_batch=192", "train.micro_batch=4", *ramp]
    made = plan("geonorm_1p3b.yaml", *with_ramp, gpus=8)
    sizes = {64: 50, 128: 25, 192: 925}
    assert made.tokens == sum(batch * count for batch, count in sizes.items()) * made.config.model.sequence_length
    alone = {
        batch: plan("geonorm_1p3b.yaml", f"train.global_batch={batch}", "train.micro_batch=4", gpus=8).layout.time.total
        for batch in sizes
    }
    assert made.seconds == pytest.approx(sum(count * alone[batch] for batch, count in sizes.items()))
    assert made.to_dict()["run_seconds"] == made.seconds
    assert made.step_tokens == 192 * made.config.model.sequence_length
    assert "batch 64 to 128 samples in the first 75 steps, 26.2 M tokens; 192 behind them" in page(made)
