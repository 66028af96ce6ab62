"""Every file in configs/ is a valid run whose model has the parameters its name says."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_ext import ParallelSettings, build_model
from pretrain.config_file import load_config
from pretrain.rules import check_config, check_layout
from tests.launch import REPOSITORY

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
NAMED_SIZES = {"125m": 125e6, "350m": 350e6, "1p3b": 1.3e9, "7b": 7e9}
SHAPES = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "1p3b": (24, 2048, 16), "7b": (32, 4096, 32)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_rules_are_kept(path: Path) -> None:
    config = load_config(path, [])
    check_config(config)
    check_layout(config, 8 * config.parallel.tp * config.parallel.pp if "demo" not in path.stem else 1)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("name", NAMED_SIZES)
def test_parameters_as_the_name_says(name: str, activation: str) -> None:
    model = load_config(REPOSITORY / f"configs/geonorm_{name}.yaml", []).model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == SHAPES[name]
    assert model.sequence_length == (4096 if NAMED_SIZES[name] >= 1e9 else 1024)
    if activation == "gelu":
        model = dataclasses.replace(model, activation="gelu", ffn_hidden_size=4 * model.hidden_size)
    built = build_model(model, ParallelSettings(), dtype=torch.bfloat16, device="meta", seed=0, token_counts=None)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    assert parameters == pytest.approx(NAMED_SIZES[name], rel=0.1)


@pytest.mark.parametrize("name", NAMED_SIZES)
def test_the_header_tells_the_tokens(name: str) -> None:
    path = REPOSITORY / f"configs/geonorm_{name}.yaml"
    config = load_config(path, [])
    tokens_a_step = config.train.global_batch * config.model.sequence_length
    header = path.read_text().splitlines()[1]
    assert f"{config.train.steps:,} steps of {tokens_a_step:,}" in header
    billions = float(header.split()[1])
    assert config.train.steps * tokens_a_step == pytest.approx(billions * 1e9, rel=0.02)
