from pathlib import Path
from typing import Any

import pytest

from pretrain.config import Config, load_config, with_scheme_defaults
from pretrain.data.manifest import load_manifest
from pretrain.errors import UserError
from pretrain.resume import changed_settings, check_resume
from tests.launch import REPOSITORY

CHECKPOINT = Path("run/checkpoints/step-00000010")


def demo(*overrides: str) -> Config:
    return load_config(REPOSITORY / "configs/demo.yaml", list(overrides))


def resolved(*overrides: str) -> Config:
    return with_scheme_defaults(demo(*overrides))


def record(manifest: Path) -> dict[str, Any]:
    data = load_manifest(manifest)
    return {
        "config": with_scheme_defaults(demo()).model_dump(mode="json"),
        "data_fingerprint": data.fingerprint,
        "vocab_size": data.vocab_size,
    }


@pytest.mark.parametrize(
    "override",
    [
        *("train.steps=999", "optimizer.lr=1e-3", "train.global_batch=32", "parallel.tp=2", "train.precision=fp32"),
        *("model.recompute=full", "model.residual.save=update", "run.dir=elsewhere", "logging.every=1"),
    ],
)
def test_what_may_change(manifest: Path, override: str) -> None:
    check_resume(resolved(override), load_manifest(manifest), CHECKPOINT, record(manifest))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers=12", "model.num_layers=12, but run/checkpoints/step-00000010 was saved with 4"),
        ("model.residual.scheme=pre_norm", "model.residual.scheme=pre_norm"),
        ("model.residual.alpha=2", "model.residual.alpha=2.0, but run/checkpoints/step-00000010 was saved with 1.0"),
        ("model.residual.clamp=none", "model.residual.clamp=none"),
        ("model.sequence_length=128", "model.sequence_length=128"),
        ("data.separate_documents=true", "data.separate_documents=True, but run/checkpoints/step-00000010 was saved"),
        ("train.seed=1", "train.seed=1, but run/checkpoints/step-00000010 was saved with 1234"),
    ],
)
def test_what_would_be_another_run(manifest: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_resume(resolved(override), load_manifest(manifest), CHECKPOINT, record(manifest))
    assert message in str(caught.value)
    assert "choose another run.dir" in str(caught.value)


def test_a_vocabulary_given_or_taken_from_the_tokenizer_is_the_same(manifest: Path) -> None:
    data = load_manifest(manifest)
    check_resume(resolved(f"model.vocab_size={data.vocab_size}"), data, CHECKPOINT, record(manifest))
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        check_resume(resolved(f"model.vocab_size={data.vocab_size + 1}"), data, CHECKPOINT, record(manifest))


def test_other_shards_are_refused_with_both_fingerprints(manifest: Path) -> None:
    saved = record(manifest) | {"data_fingerprint": "0123456789abcdef"}
    data = load_manifest(manifest)
    with pytest.raises(UserError, match=rf"{data.fingerprint[:12]}.* trained on 0123456789ab"):
        check_resume(resolved(), data, CHECKPOINT, saved)


def test_a_setting_newer_than_the_checkpoint_is_no_difference(manifest: Path) -> None:
    saved = record(manifest)
    del saved["config"]["model"]["norm_epsilon"]
    check_resume(resolved(), load_manifest(manifest), CHECKPOINT, saved)


def test_changes_are_told(manifest: Path) -> None:
    assert changed_settings(resolved(), record(manifest)) == []
    assert changed_settings(resolved("train.steps=999", "parallel.tp=2"), record(manifest)) == [
        "train.steps: 150 -> 999",
        "parallel.tp: 1 -> 2",
    ]
