import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config import Config, with_scheme_defaults
from pretrain.config_file import load_config
from pretrain.data.manifest import load_manifest
from pretrain.datasets import Dataset, Facts, facts_of, load_datasets, shares_of, token_counts
from pretrain.errors import UserError
from pretrain.resume import changed_settings, check_resume, go_on_with_data
from pretrain.state import TrainState
from tests.launch import REPOSITORY

CHECKPOINT = Path("run/checkpoints/step-00000010")


def demo(*overrides: str) -> Config:
    return load_config(REPOSITORY / "configs/demo.yaml", list(overrides))


def resolved(*overrides: str) -> Config:
    return with_scheme_defaults(demo(*overrides))


def single(manifest: Path) -> list[Dataset]:
    return [Dataset("data", load_manifest(manifest))]


def facts(manifest: Path) -> Facts:
    return facts_of(single(manifest))


def record(manifest: Path) -> dict[str, Any]:
    data = load_manifest(manifest)
    return {
        "config": with_scheme_defaults(demo()).model_dump(mode="json"),
        "tokenizer_sha256": data.tokenizer_sha256,
        "vocab_size": data.vocab_size,
    }


@pytest.mark.parametrize(
    "override",
    [
        *("train.steps=999", "optimizer.lr=1e-3", "train.global_batch=32", "parallel.tp=2", "train.precision=fp32"),
        *(
            "model.recompute=selective",
            "model.kernels=compiled",
            "model.residual.save=update",
            "run.dir=elsewhere",
            "logging.every=1",
        ),
    ],
)
def test_what_may_change(manifest: Path, override: str) -> None:
    check_resume(resolved(override), facts(manifest), CHECKPOINT, record(manifest))


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
        check_resume(resolved(override), facts(manifest), CHECKPOINT, record(manifest))
    assert message in str(caught.value)
    assert "choose another run.dir" in str(caught.value)


def test_a_vocabulary_given_or_taken_from_the_tokenizer_is_the_same(manifest: Path) -> None:
    data = load_manifest(manifest)
    check_resume(resolved(f"model.vocab_size={data.vocab_size}"), facts(manifest), CHECKPOINT, record(manifest))
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        check_resume(resolved(f"model.vocab_size={data.vocab_size + 1}"), facts(manifest), CHECKPOINT, record(manifest))


def test_another_tokenizer_is_refused_with_both_fingerprints(manifest: Path) -> None:
    saved = record(manifest) | {"tokenizer_sha256": "0123456789abcdef"}
    with pytest.raises(UserError) as caught:
        check_resume(resolved("data.on_change=new_stage"), facts(manifest), CHECKPOINT, saved)
    assert str(caught.value) == (
        f"the data were built with the tokenizer {load_manifest(manifest).tokenizer_sha256[:12]}, but {CHECKPOINT} was "
        f"trained with 0123456789ab; use the same tokenizer or choose another run.dir"
    )


LENGTH = ["model.sequence_length=32"]


def mixture(manifest: Path, **weights: float) -> list[Dataset]:
    """Data sets of these names and weights; each name is a fingerprint too."""
    one = load_manifest(manifest)
    return [
        Dataset(name, dataclasses.replace(one, name=name, fingerprint=name * 12), weight)
        for name, weight in weights.items()
    ]


def trained(manifest: Path, **weights: float) -> TrainState:
    """The state of a run that has consumed 80 samples of this mixture."""
    state = TrainState(step=10)
    go_on_with_data(resolved(*LENGTH), mixture(manifest, **weights), state, None)
    state.consumed_samples = 80
    return state


def test_a_run_begins_with_one_stage(manifest: Path) -> None:
    state = TrainState()
    go_on_with_data(resolved(*LENGTH), single(manifest), state, None)
    (stage,) = state.data.stages
    (share,) = stage.shares
    data = load_manifest(manifest)
    assert (stage.start, share.fingerprint, share.order) == (0, data.fingerprint, "")
    assert share.samples == data.splits["train"].samples


def test_the_same_mixture_goes_on(manifest: Path) -> None:
    state = trained(manifest, a=0.3, b=0.7)
    before = list(state.data.stages)
    go_on_with_data(resolved(*LENGTH), mixture(manifest, b=7.0, a=3.0), trained(manifest, a=3.0, b=7.0), CHECKPOINT)
    go_on_with_data(resolved(*LENGTH), mixture(manifest, a=0.3, b=0.7), state, CHECKPOINT)
    assert state.data.stages == before


@pytest.mark.parametrize(
    ("before", "after", "now", "then"),
    [
        ({"a": 1.0}, {"b": 1.0}, "bbbbbbbbbbbb (b)", "aaaaaaaaaaaa"),
        ({"a": 1.0}, {"a": 3.0, "b": 1.0}, "aaaaaaaaaaaa (a) 0.75, bbbbbbbbbbbb (b) 0.25", "aaaaaaaaaaaa (a)"),
        ({"a": 1.0, "b": 1.0}, {"a": 1.0}, "aaaaaaaaaaaa (a)", "aaaaaaaaaaaa (a) 0.5, bbbbbbbbbbbb 0.5"),
    ],
)
def test_another_mixture_is_refused_with_both_fingerprints(
    manifest: Path, before: dict[str, float], after: dict[str, float], now: str, then: str
) -> None:
    state = trained(manifest, **before)
    with pytest.raises(UserError) as caught:
        go_on_with_data(resolved(*LENGTH), mixture(manifest, **after), state, CHECKPOINT)
    assert str(caught.value) == (
        f"the data are {now}, but {CHECKPOINT} was trained on {then}; use the same data, go on with these from here by "
        f"data.on_change=new_stage, or choose another run.dir"
    )
    assert len(state.data.stages) == 1


def test_a_new_stage_begins_where_the_run_stands(manifest: Path) -> None:
    state = trained(manifest, a=1.0)
    state.data.skip(90, 10, consumed_samples=80)
    state.consumed_samples = 96
    config = resolved(*LENGTH, "data.on_change=new_stage")
    mixed = go_on_with_data(config, mixture(manifest, a=3.0, b=1.0), state, CHECKPOINT)
    first, second = state.data.stages
    assert (first.start, second.start) == (0, 106)
    assert [(share.fingerprint, share.first, share.order) for share in second.shares] == [
        ("a" * 12, 106, ""),
        ("b" * 12, 0, "b" * 12),
    ]
    go_on_with_data(config, mixture(manifest, a=3.0, b=1.0), state, CHECKPOINT)
    assert state.data.stages == [first, second]
    numbers, own = mixed.locate(np.arange(100, 300))
    assert own[numbers == 0].tolist() == [*range(100, 100 + np.count_nonzero(numbers == 0))]


def test_epochs_that_end_before_the_run_are_refused(manifest: Path) -> None:
    limited = [dataclasses.replace(dataset, max_epochs=2) for dataset in mixture(manifest, a=1.0, b=1.0)]
    samples = load_manifest(manifest).splits["train"].samples
    total = 4 * samples
    enough = ["train.global_batch=2", "train.micro_batch=2", f"train.steps={total // 2}"]
    go_on_with_data(resolved(*LENGTH, *enough), limited, TrainState(), None)
    short = resolved(*LENGTH, *enough[:2], f"train.steps={total // 2 + 1}")
    with pytest.raises(UserError) as caught:
        go_on_with_data(short, limited, TrainState(), None)
    assert str(caught.value) == (
        f"train.steps={total // 2 + 1} needs {total + 2} samples, but data.datasets end after {total} (max_epochs x "
        f"samples: a 2 x {samples}, b 2 x {samples}); lower train.steps or raise max_epochs"
    )
    ramp = ["train.rampup.start=2", "train.rampup.increment=2", "train.rampup.samples=8", "train.global_batch=4"]
    ramping = [*ramp, "train.micro_batch=2"]  # 4 steps of 2 samples, then of 4
    go_on_with_data(resolved(*LENGTH, *ramping, f"train.steps={4 + (total - 8) // 4}"), limited, TrainState(), None)
    with pytest.raises(UserError, match=f"needs {8 + (total - 8) // 4 * 4 + 4} samples, but data.datasets end after"):
        go_on_with_data(resolved(*LENGTH, *ramping, f"train.steps={5 + (total - 8) // 4}"), limited, TrainState(), None)
    skipping = TrainState()
    skipping.data.skip(10, 1, consumed_samples=0)
    with pytest.raises(UserError, match=f"needs {total} samples, but data.datasets end after {total - 1} "):
        go_on_with_data(resolved(*LENGTH, *enough), limited, skipping, None)
    endless = [limited[0], dataclasses.replace(limited[1], max_epochs=None)]
    go_on_with_data(short, endless, TrainState(), None)


def test_a_list_of_one_data_set_is_the_simple_form(manifest: Path) -> None:
    listed = load_datasets(demo("data.manifest=null", f"data.datasets=[{{manifest: {manifest}}}]").data)
    plain = load_datasets(demo(f"data.manifest={manifest}").data)
    assert shares_of(listed, 32) == shares_of(plain, 32)


def test_token_counts_follow_the_weights(manifest: Path) -> None:
    a, b = mixture(manifest, a=3.0, b=1.0)
    assert token_counts([a]) == a.manifest.token_counts.tolist()
    other = np.zeros_like(a.manifest.token_counts)
    other[7] = 10 * a.manifest.token_counts.sum()
    b = dataclasses.replace(b, manifest=dataclasses.replace(b.manifest, token_counts=other))
    mixed = np.array(token_counts([a, b]))
    part = a.manifest.token_counts / a.manifest.token_counts.sum()
    part[7] = part[7] + 1 / 3
    np.testing.assert_allclose(mixed / mixed.sum(), 0.75 * part, atol=1e-5)


def test_a_setting_newer_than_the_checkpoint_is_no_difference(manifest: Path) -> None:
    saved = record(manifest)
    del saved["config"]["model"]["norm_epsilon"]
    check_resume(resolved(), facts(manifest), CHECKPOINT, saved)


def test_changes_are_told(manifest: Path) -> None:
    assert changed_settings(resolved(), record(manifest)) == []
    assert changed_settings(resolved("train.steps=999", "parallel.tp=2"), record(manifest)) == [
        "train.steps: 150 -> 999",
        "parallel.tp: 1 -> 2",
    ]
