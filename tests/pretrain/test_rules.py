"""Each rule: kept by the demo, broken by one change, and its message says what to change."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import SCHEMES
from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.data.manifest import load_manifest
from pretrain.datasets import Dataset
from pretrain.errors import UserError
from pretrain.rules import CONFIG_RULES, DATA_RULES, LAYOUT_RULES, check_config, check_data, check_layout
from tests.launch import REPOSITORY
from tests.pretrain import broken_training


def demo(*overrides: str) -> Config:
    return load_config(REPOSITORY / "configs/demo.yaml", list(overrides))


BROKEN_SETTINGS = [
    (
        "what_is_kept_beside_the_last_can_be_told",
        ["checkpoint.keep_best=true"],
        "checkpoint.keep_best=true: all are kept anyway; set checkpoint.keep_last",
    ),
    (
        "what_is_kept_beside_the_last_can_be_told",
        ["checkpoint.keep_last=2", "checkpoint.every=50", "checkpoint.keep_every=120"],
        "checkpoint.keep_every=120 is no multiple of checkpoint.every=50",
    ),
    (
        "what_is_kept_beside_the_last_can_be_told",
        ["checkpoint.keep_last=2", "checkpoint.every=50", "validation.every=20", "checkpoint.keep_best=true"],
        "checkpoint.every=50 is no multiple of validation.every=20",
    ),
    (
        "profile_is_within_the_run",
        ["profile.window=2", "profile.first=301", "train.steps=300"],
        "profile.first=301 is beyond train.steps=300; lower it",
    ),
    ("sizes_are_positive", ["model.num_layers=0"], "model.num_layers=0: must be positive"),
    ("sizes_are_positive", ["parallel.tp=-1"], "parallel.tp=-1: must be positive"),
    ("sizes_are_positive", ["model.init_std=.inf"], "model.init_std=inf: must be positive"),
    ("heads_divide_hidden_size", ["model.num_attention_heads=3"], "model.num_attention_heads=3"),
    ("rope_needs_an_even_head_width", ["model.hidden_size=36"], "gives heads of 9 channels"),
    ("dropout_is_a_share", ["model.dropout=1"], "model.dropout=1.0: must be in [0, 1)"),
    ("dropout_is_a_share", ["model.dropout=-0.1"], "model.dropout=-0.1: must be in [0, 1)"),
    ("z_loss_is_a_weight", ["model.z_loss=-1e-4"], "model.z_loss=-0.0001: must be 0 (off) or positive"),
    ("query_groups_divide_heads", ["model.num_query_groups=3"], "does not divide model.num_attention_heads=4"),
    ("heads_divide_over_tp", ["parallel.tp=3"], "model.num_attention_heads=4 is not divisible by parallel.tp=3"),
    ("heads_divide_over_tp", ["parallel.tp=4", "model.num_query_groups=2"], "model.num_query_groups=2"),
    ("ffn_divides_over_tp", ["parallel.tp=2", "model.ffn_hidden_size=701"], "model.ffn_hidden_size=701"),
    ("sequence_parallel_needs_tp", ["parallel.sp=true"], "raise parallel.tp or set parallel.sp=false"),
    (
        "sequence_parallel_needs_tp",
        ["parallel.sp=true", "parallel.tp=2", "model.sequence_length=255"],
        "model.sequence_length=255 is not divisible by parallel.tp=2",
    ),
    ("layers_divide_over_pp", ["parallel.pp=3"], "model.num_layers=4 is not divisible by parallel.pp=3"),
    (
        "layers_divide_over_pp",
        ["parallel.pp=2", "parallel.vpp=4"],
        "model.num_layers=4 is not divisible by parallel.pp=2 x parallel.vpp=4; lower parallel.vpp",
    ),
    (
        "virtual_stages_need_a_pipeline",
        ["parallel.vpp=2"],
        "parallel.vpp=2 needs parallel.pp of at least 2; raise parallel.pp or set parallel.vpp=1",
    ),
    (
        "sequence_divides_over_cp",
        ["parallel.cp=3"],
        "model.sequence_length=256 is not divisible by 2 x parallel.cp=3; change either",
    ),
    (
        "sequence_parallel_needs_tp",
        ["parallel.sp=true", "parallel.tp=4", "parallel.cp=5", "model.sequence_length=50"],
        "model.sequence_length=50 over parallel.cp=5 is not divisible by parallel.tp=4",
    ),
    (
        "divided_gradients_need_one_stage",
        ["zero.stage=2", "parallel.pp=2"],
        "zero.stage=2 does not go with parallel.pp=2; set zero.stage=1 or parallel.pp=1",
    ),
    ("divided_gradients_need_one_stage", ["zero.stage=3", "parallel.pp=4"], "zero.stage=3 does not go with"),
    ("scheme_is_known", ["model.residual.scheme=geonrm"], "did you mean geonorm?"),
    (
        "residual_settings_fit_the_scheme",
        ["model.residual.scheme=pre_norm", "model.residual.clamp=1"],
        "model.residual.clamp=1.0: means nothing to the scheme pre_norm; remove it",
    ),
    (
        "residual_settings_fit_the_scheme",
        ["model.residual.p=2"],
        "model.residual.p=2.0: means nothing to the scheme geonorm; remove it",
    ),
    ("residual_settings_fit_the_scheme", ["model.residual.scheme=p"], "model.residual.p is missing"),
    ("residual_numbers_are_positive", ["model.residual.alpha=0"], "model.residual.alpha=0.0: must be positive"),
    ("residual_numbers_are_positive", ["model.residual.alpha=.inf"], "model.residual.alpha=inf: must be positive"),
    ("residual_numbers_are_positive", ["model.residual.angle_scale=-1"], "model.residual.angle_scale=-1.0"),
    ("residual_numbers_are_positive", ["model.residual.radius=1e-30"], "choose a number between 1e-9 and 1e9"),
    (
        "residual_numbers_are_positive",
        ["model.residual.scheme=p", "model.residual.p=1e200"],
        "model.residual.p=1e+200: its square leaves fp32",
    ),
    (
        "residual_numbers_are_positive",
        ["model.residual.radius=-1"],
        "model.residual.radius=-1.0: must be positive, sqrt_hidden or learned",
    ),
    (
        "residual_numbers_are_positive",
        ["model.residual.scheme=p", "model.residual.p=0"],
        "model.residual.p=0.0: must be positive",
    ),
    (
        "residual_numbers_are_positive",
        ["model.residual.scheme=pre_dyt", "model.residual.dyt_alpha=0"],
        "model.residual.dyt_alpha=0.0",
    ),
    ("clamp_is_within_half_a_turn", ["model.residual.clamp=3.2"], "an angle in (0, pi] radians, or none"),
    ("clamp_is_within_half_a_turn", ["model.residual.clamp=0"], "an angle in (0, pi] radians, or none"),
    (
        "saved_output_shows_the_update",
        ["model.residual.save=output", "model.residual.clamp=none"],
        "model.residual.save=output: the angle of a step must stay below 2.9 rad; set clamp to less than that, or use",
    ),
    ("saved_output_shows_the_update", ["model.residual.save=output", "model.residual.clamp=3"], "set clamp to less"),
    (
        "saved_output_shows_the_update",
        ["model.residual.save=output", "model.residual.clamp=0.05"],
        "save=output: angles of at most 0.05 rad vanish in the rounding; let them grow to 0.1 rad, or use save=update",
    ),
    (
        "saved_output_shows_the_update",
        ["model.residual.scheme=proj", "model.residual.save=output"],
        "model.residual.save=output: learn_alpha and learn_angle_scale must be false, or use save=update",
    ),
    (
        "saved_output_shows_the_update",
        ["model.residual.scheme=cayley", "model.residual.save=output", "model.residual.learn_alpha=false"],
        "set clamp to less than that",
    ),
    ("micro_batch_divides_global_batch", ["train.global_batch=15"], "train.global_batch=15"),
    ("schedule_fits_the_run", ["train.steps=10"], "optimizer.warmup_steps=15 must be below train.steps=10"),
    ("scheme_is_known", ["model.residual.scheme=GEONORM"], "did you mean geonorm?"),
    ("run_has_a_folder", ["run.dir=''"], "run.dir is empty; name a folder for the run"),
    (
        "data_are_named_once",
        ["data.manifest=null"],
        "data.manifest is missing; give it, or several data sets as data.datasets",
    ),
    (
        "data_are_named_once",
        ["data.datasets=[{manifest: a}]"],
        "data.manifest=runs/demo/data/shards/manifest.json and data.datasets are both given; remove one",
    ),
    ("schedule_fits_the_run", ["optimizer.min_lr=1"], "optimizer.min_lr=1.0 is above optimizer.lr=0.002"),
]
BROKEN_SETTINGS += broken_training.SETTINGS
BROKEN_SETTINGS += [
    ("spikes_are_told_before_they_are_acted_on", ["spikes.act=5"], "spikes.act=5 is below spikes.log=7; raise it"),
    (
        "a_rollback_has_where_to_go",
        ["spikes.policy=rollback", "checkpoint.every=0"],
        "spikes.policy=rollback goes back to a checkpoint, but checkpoint.every=0 saves none",
    ),
    (
        "a_rollback_has_where_to_go",
        ["spikes.policy=rollback", "checkpoint.keep_last=1"],
        "raise checkpoint.keep_last=1 to at least 2",
    ),
    (
        "a_lower_rate_lasts",
        ["spikes.policy=rollback", "spikes.lr_factor=0.5"],
        "spikes.lr_factor=0.5 and spikes.lr_steps=0 belong together",
    ),
    (
        "a_lower_rate_lasts",
        ["spikes.lr_factor=0.5", "spikes.lr_steps=10"],
        "spikes.lr_factor=0.5 follows a rollback, but spikes.policy=log; remove it",
    ),
]
STREAM = ["data.manifest=null", "data.mode=stream", "data.urls=a-{0..3}.tar", "data.tokenizer=t.model"]
STREAM += ["data.validation_urls=b.tar", "model.output_bias=learned"]
BROKEN_SETTINGS += [
    (
        "a_rollback_has_where_to_go",
        [*STREAM, "spikes.policy=rollback"],
        "spikes.policy=rollback skips samples, which data.mode=stream cannot; use spikes.policy=skip_step",
    ),
    ("mode_reads_what_is_named", ["data.urls=a.tar"], "data.urls belongs to data.mode=stream; set that, or remove it"),
    ("mode_reads_what_is_named", ["data.eod_id=0"], "data.eod_id belongs to data.mode=stream"),
    (
        "mode_reads_what_is_named",
        [*STREAM, "data.manifest=m.json"],
        "data.manifest belongs to data.mode=shards, and data.mode=stream reads data.urls; remove either",
    ),
    (
        "mode_reads_what_is_named",
        [*STREAM, "data.datasets=[{manifest: a}]"],
        "data.datasets belongs to data.mode=shards",
    ),
    ("mode_reads_what_is_named", [*STREAM, "data.urls=[]"], "data.urls is missing, which data.mode=stream needs"),
    ("mode_reads_what_is_named", [*STREAM, "data.tokenizer=null"], "data.tokenizer is missing, which data.mode=stream"),
    (
        "stream_has_places_that_can_be_read",
        [*STREAM, "data.urls=['pipe:rm -rf x']"],
        "pipe:rm -rf x: pipe: is not supported; give a path, or a URL of file, http, https or s3",
    ),
    ("stream_has_places_that_can_be_read", [*STREAM, "data.urls=[a.tar, a.tar]"], "data.urls names a.tar twice"),
    (
        "stream_has_places_that_can_be_read",
        [*STREAM, "data.validation_urls=b{.tar"],
        "data.validation_urls=b{.tar:",
    ),
    (
        "stream_has_places_that_can_be_read",
        [*STREAM, "data.validation_urls=a-2.tar"],
        "a-2.tar is both in data.urls and in data.validation_urls; remove it from one",
    ),
    (
        "stream_does_not_change",
        [*STREAM, "data.on_change=new_stage"],
        "data.on_change=new_stage needs data.mode",
    ),
    (
        "stream_has_held_out_shards",
        [*STREAM, "data.validation_urls=[]"],
        "validation.every=50 needs held-out shards in data.mode=stream; name them by data.validation_urls or set",
    ),
    (
        "stream_knows_no_token_counts",
        [*STREAM, "model.output_bias=unigram"],
        "model.output_bias=unigram needs token counts, which nobody has in data.mode=stream; set",
    ),
]
BROKEN_LAYOUTS: list[tuple[str, list[str], int, str]] = [
    (
        "stream_has_a_shard_for_every_rank",
        [*STREAM, "train.micro_batch=1"],
        8,
        "data.urls name 4 shard(s), but each of the 8 data-parallel ranks reads its own in data.mode=stream",
    ),
    ("world_size_fits_model_parallel", ["parallel.tp=2"], 3, "start a multiple of 2 processes"),
    ("profiled_ranks_exist", ["profile.window=2", "profile.global_ranks=[0,2]"], 2, "has 2, but the 2 process(es) are"),
    ("world_size_fits_model_parallel", ["parallel.cp=2"], 3, "parallel.pp=1 x parallel.cp=2; start a multiple of 2"),
    (
        "virtual_stages_fill_their_rounds",
        ["parallel.pp=2", "parallel.vpp=2"],
        2,
        "parallel.vpp=2 takes micro batches in rounds of parallel.pp=2, and a step of 8 samples has 1 a data-",
    ),
    *broken_training.LAYOUTS,
    ("global_batch_fits_data_parallel", [], 3, "train.global_batch=8 is not divisible by train.micro_batch=8 x 3"),
]
BROKEN_DATA = [
    ("sequence_fits_shards", ["model.sequence_length=64"], "longer than the shards' 32"),
    ("sequence_fits_shards", ["model.sequence_length=24"], "does not divide the shards' 32"),
    ("vocabulary_fits_tokenizer", ["model.vocab_size=100"], "smaller than the tokenizer's"),
]
BROKEN_MIXTURES: list[tuple[str, dict[str, Any], str]] = [
    ("data_sets_have_names_of_their_own", {"fingerprint": "f"}, "two of data.datasets are called data; give one"),
    ("data_sets_differ", {"name": "other"}, "data.datasets: data and other are the same data set {fingerprint}; "),
    (
        "tokenizers_are_the_same",
        {"name": "other", "fingerprint": "f", "tokenizer_sha256": "0" * 64},
        "data.datasets: data was built with the tokenizer {tokenizer}, other with 000000000000; build both with the",
    ),
    (
        "tokenizers_are_the_same",
        {"name": "other", "fingerprint": "f", "eod_id": 2},
        "data.datasets: data was built with the tokenizer {tokenizer}, other with {tokenizer}; build both with the",
    ),
]
NO_VALIDATION = ("validation_has_samples", "has no validation split; set validation.every=0")


def test_every_rule_is_broken_here() -> None:
    tested = {row[0] for row in (*BROKEN_SETTINGS, *BROKEN_LAYOUTS, *BROKEN_DATA, *BROKEN_MIXTURES, NO_VALIDATION)}
    assert tested == {rule.__name__ for rule in (*CONFIG_RULES, *LAYOUT_RULES, *DATA_RULES)}


def test_the_demo_keeps_all(manifest: Path) -> None:
    check_config(demo())
    check_layout(demo("parallel.tp=2"), 2)
    check_config(demo(*STREAM))
    check_layout(demo(*STREAM, "train.micro_batch=1", "parallel.tp=2"), 8)
    check_data(demo("model.sequence_length=32"), [Dataset("data", load_manifest(manifest))])


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"scheme={name}"] for name in SCHEMES if name != "p"),
        ["scheme=p", "p=0.5"],
        ["scheme=p", "p=1", "learn_alpha=false", "save=output"],
        ["scheme=proj", "learn_alpha=false", "save=output", "clamp=1.0"],
        ["scheme=geonorm", "save=output", "clamp=2.8"],
        ["scheme=geonorm", "clamp=none", "learn_angle_scale=true", "radius=learned", "final_norm=none"],
        ["scheme=ngpt_lerp", "alpha=0.1", "radius=1.0"],
        ["scheme=pre_dyt", "dyt_alpha=0.5", "dyt_attention_alpha=0.8"],
        ["scheme=post_norm", "output_init=scaled"],
    ],
    ids=" ".join,
)
def test_every_scheme_and_its_settings_are_accepted(overrides: list[str]) -> None:
    check_config(demo(*(f"model.residual.{override}" for override in overrides)))


@pytest.mark.parametrize(("rule", "overrides", "message"), BROKEN_SETTINGS)
def test_settings(rule: str, overrides: list[str], message: str) -> None:
    config = demo(*overrides)
    broken = {other.__name__: other(config) for other in CONFIG_RULES if other(config)}
    assert message in (broken.get(rule) or ""), broken
    with pytest.raises(UserError):
        check_config(config)


@pytest.mark.parametrize(("rule", "overrides", "world_size", "message"), BROKEN_LAYOUTS)
def test_layouts(rule: str, overrides: list[str], world_size: int, message: str) -> None:
    config = demo(*overrides)
    assert message in ({r.__name__: r(config, world_size) for r in LAYOUT_RULES}[rule] or "")
    with pytest.raises(UserError):
        check_layout(config, world_size)


@pytest.mark.parametrize(("rule", "overrides", "message"), BROKEN_DATA)
def test_data(manifest: Path, rule: str, overrides: list[str], message: str) -> None:
    config, data = demo(*overrides), [Dataset("data", load_manifest(manifest))]
    assert message in ({r.__name__: r(config, data) for r in DATA_RULES}[rule] or "")
    with pytest.raises(UserError):
        check_data(config, data)


def test_a_data_set_without_validation(manifest: Path) -> None:
    whole = load_manifest(manifest)
    data = [Dataset("data", dataclasses.replace(whole, splits={"train": whole.split("train")}))]
    rules = {rule.__name__: rule for rule in DATA_RULES}
    assert NO_VALIDATION[1] in (rules[NO_VALIDATION[0]](demo(), data) or "")
    assert rules[NO_VALIDATION[0]](demo("validation.every=0"), data) is None
    assert rules[NO_VALIDATION[0]](demo(), [*data, Dataset("other", whole)]) is None


@pytest.mark.parametrize(("rule", "changes", "message"), BROKEN_MIXTURES)
def test_mixtures(manifest: Path, rule: str, changes: dict[str, Any], message: str) -> None:
    one = load_manifest(manifest)
    other = dataclasses.replace(one, **changes)
    datasets = [Dataset(one.name, one), Dataset(other.name, other)]
    expected = message.format(fingerprint=one.fingerprint[:12], tokenizer=one.tokenizer_sha256[:12])
    broken = {other.__name__: other(demo("model.sequence_length=32"), datasets) for other in DATA_RULES}
    assert (broken[rule] or "").startswith(expected), broken


def test_a_mixture_of_two_data_sets_of_their_own_is_accepted(manifest: Path) -> None:
    one = load_manifest(manifest)
    other = dataclasses.replace(one, name="other", fingerprint="f", sequence_length=64)
    check_data(demo("model.sequence_length=32"), [Dataset(one.name, one), Dataset(other.name, other)])
    with pytest.raises(UserError, match="is longer than the shards' 32"):
        check_data(demo("model.sequence_length=64"), [Dataset(other.name, other), Dataset(one.name, one)])


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_without_rope_a_head_may_have_any_width(positions: str) -> None:
    check_config(demo("model.hidden_size=36", f"model.positions={positions}"))


def test_a_larger_vocabulary_is_allowed(manifest: Path) -> None:
    data = load_manifest(manifest)
    check_data(demo("model.sequence_length=32", f"model.vocab_size={data.vocab_size + 5}"), [Dataset("data", data)])
