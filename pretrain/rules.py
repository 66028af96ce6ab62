"""Rules that relate settings to one another, to the world size and to the data: one small function each.

A rule returns None when it is kept, else one line that names the settings and says what to change. All are checked
before any process group starts.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_ext.schemes import SCHEMES, with_defaults
from megatron_ext.schemes.sphere import power_of, why_output_is_unsafe
from pretrain.config import Config
from pretrain.datasets import Dataset
from pretrain.errors import UserError
from pretrain.stream_rules import (
    mode_reads_what_is_named,
    stream_does_not_change,
    stream_has_a_shard_for_every_rank,
    stream_has_held_out_shards,
    stream_has_places_that_can_be_read,
    stream_knows_no_token_counts,
)


def sizes_are_positive(config: Config) -> str | None:
    """Layer counts and widths are positive integers."""
    model, parallel = config.model, config.parallel
    sizes = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.sequence_length": model.sequence_length,
        "model.vocab_size": model.vocab_size,
        "model.rope_base": model.rope_base,
        "model.norm_epsilon": model.norm_epsilon,
        "model.init_std": model.init_std,
        "parallel.tp": parallel.tp,
        "parallel.pp": parallel.pp,
    }
    for name, size in sizes.items():
        if size is not None and not 0 < size < math.inf:
            return f"{name}={size}: must be positive"
    return None


def heads_divide_hidden_size(config: Config) -> str | None:
    """Every head has the same number of channels."""
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if hidden % heads:
        return f"model.hidden_size={hidden} is not divisible by model.num_attention_heads={heads}; change either"
    return None


def rope_needs_an_even_head_width(config: Config) -> str | None:
    """RoPE turns pairs of channels."""
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if config.model.positions == "rope" and (hidden // heads) % 2:
        return (
            f"model.hidden_size={hidden} over model.num_attention_heads={heads} gives heads of {hidden // heads} "
            f"channels, which model.positions=rope needs to be even; change either, or model.positions"
        )
    return None


def dropout_is_a_share(config: Config) -> str | None:
    """Dropout keeps something."""
    dropout = config.model.dropout
    return None if 0 <= dropout < 1 else f"model.dropout={dropout}: must be in [0, 1), for example 0.1"


def z_loss_is_a_weight(config: Config) -> str | None:
    """The z-loss is added, not taken away."""
    z_loss = config.model.z_loss
    return None if 0 <= z_loss < math.inf else f"model.z_loss={z_loss}: must be 0 (off) or positive, for example 1e-4"


def query_groups_divide_heads(config: Config) -> str | None:
    """Every key/value head serves the same number of query heads."""
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    if groups is not None and heads % groups:
        return f"model.num_query_groups={groups} does not divide model.num_attention_heads={heads}; change either"
    return None


def heads_divide_over_tp(config: Config) -> str | None:
    """Each tensor-parallel rank holds the same number of query and of key/value heads."""
    heads, tp = config.model.num_attention_heads, config.parallel.tp
    groups = config.model.num_query_groups
    if heads % tp:
        return f"model.num_attention_heads={heads} is not divisible by parallel.tp={tp}; change either"
    if groups is not None and groups % tp:
        return f"model.num_query_groups={groups} is not divisible by parallel.tp={tp}; change either"
    return None


def ffn_divides_over_tp(config: Config) -> str | None:
    """Each tensor-parallel rank holds the same slice of the MLP."""
    ffn, tp = config.model.ffn_hidden_size, config.parallel.tp
    return f"model.ffn_hidden_size={ffn} is not divisible by parallel.tp={tp}; change either" if ffn % tp else None


def sequence_parallel_needs_tp(config: Config) -> str | None:
    """Sequence parallelism splits the sequence over the tensor-parallel ranks."""
    if not config.parallel.sp:
        return None
    tp, sequence = config.parallel.tp, config.model.sequence_length
    if tp == 1:
        return "parallel.sp=true needs parallel.tp of at least 2; raise parallel.tp or set parallel.sp=false"
    if sequence % tp:
        return f"model.sequence_length={sequence} is not divisible by parallel.tp={tp}, which parallel.sp=true needs"
    return None


def layers_divide_over_pp(config: Config) -> str | None:
    """Each pipeline stage holds the same number of layers."""
    layers, pp = config.model.num_layers, config.parallel.pp
    return f"model.num_layers={layers} is not divisible by parallel.pp={pp}; change either" if layers % pp else None


def scheme_is_known(config: Config) -> str | None:
    """The residual scheme is in the registry."""
    scheme = config.model.residual.scheme
    if scheme in SCHEMES:
        return None
    near = difflib.get_close_matches(scheme.lower(), SCHEMES, n=1, cutoff=0.0)
    return f"model.residual.scheme={scheme}: unknown; did you mean {near[0]}? (known: {', '.join(SCHEMES)})"


def residual_settings_fit_the_scheme(config: Config) -> str | None:
    """Nothing is set that means nothing to the scheme, and nothing that it needs is missing."""
    try:
        with_defaults(config.model.residual)
    except ValueError as error:
        return str(error)
    return None


def residual_numbers_are_positive(config: Config) -> str | None:
    """Exponent, step size, scales and radius are positive, and fp32 holds their squares: a state must not become 0."""
    residual = config.model.residual
    for name in ("p", "alpha", "angle_scale", "radius", "dyt_attention_alpha", "dyt_alpha"):
        value = getattr(residual, name)
        if isinstance(value, (int, float)) and not 0 < value < math.inf:
            words = ", sqrt_hidden or learned" if name == "radius" else ""
            return f"model.residual.{name}={value}: must be positive{words}"
        if isinstance(value, (int, float)) and not 1e-9 <= value <= 1e9:
            return f"model.residual.{name}={value}: its square leaves fp32; choose a number between 1e-9 and 1e9"
    return None


def clamp_is_within_half_a_turn(config: Config) -> str | None:
    """The exponential map is one-to-one up to half a turn."""
    clamp = config.model.residual.clamp
    if isinstance(clamp, (int, float)) and not 0 < clamp <= math.pi:
        return f"model.residual.clamp={clamp}: must be an angle in (0, pi] radians, or none"
    return None


def saved_output_shows_the_update(config: Config) -> str | None:
    """A step's update can be rebuilt from its output in the backward pass."""
    if residual_settings_fit_the_scheme(config):
        return None
    residual = with_defaults(config.model.residual)
    if residual.save != "output":
        return None
    reason = why_output_is_unsafe(residual, power_of(residual))
    return f"model.residual.save=output: {reason}, or use save=update" if reason else None


def micro_batch_divides_global_batch(config: Config) -> str | None:
    """A step is a whole number of micro batches."""
    micro, batch = config.train.micro_batch, config.train.global_batch
    return (
        f"train.global_batch={batch} is not divisible by train.micro_batch={micro}; change either"
        if batch % micro
        else None
    )


def schedule_fits_the_run(config: Config) -> str | None:
    """The learning rate rises within the run and does not end above its peak."""
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps >= steps:
        return f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.steps={steps}; change either"
    if optimizer.min_lr > optimizer.lr:
        return f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}; lower it"
    return None


def data_are_named_once(config: Config) -> str | None:
    """The data come from one data set or from a list."""
    if config.data.mode == "stream":
        return None
    one, several = config.data.manifest, config.data.datasets
    if one is None and not several:
        return "data.manifest is missing; give it, or several data sets as data.datasets"
    if one is not None and several:
        return f"data.manifest={one} and data.datasets are both given; remove one (data.manifest=null)"
    return None


def what_is_kept_beside_the_last_can_be_told(config: Config) -> str | None:
    """Checkpoints that retention spares beside the last ones exist and can be compared."""
    settings, validation = config.checkpoint, config.validation
    for name in ("keep_every", "keep_best"):
        if getattr(settings, name) and settings.keep_last is None:
            value = str(getattr(settings, name)).lower()
            return f"checkpoint.{name}={value}: all are kept anyway; set checkpoint.keep_last, or leave it out"
    if settings.keep_every and (not settings.every or settings.keep_every % settings.every):
        return (
            f"checkpoint.keep_every={settings.keep_every} is no multiple of checkpoint.every={settings.every}; "
            f"change either"
        )
    if settings.keep_best and (not validation.every or settings.every % validation.every):
        return (
            f"checkpoint.keep_best=true compares validation losses, but checkpoint.every={settings.every} is no "
            f"multiple of validation.every={validation.every}; change either"
        )
    return None


def run_has_a_folder(config: Config) -> str | None:
    """A run's files do not mix with those of the current folder."""
    return "run.dir is empty; name a folder for the run" if config.run.dir == Path() else None


def world_size_fits_model_parallel(config: Config, world_size: int) -> str | None:
    """Every process belongs to one tensor- and one pipeline-parallel group."""
    tp, pp = config.parallel.tp, config.parallel.pp
    if world_size % (tp * pp):
        return (
            f"{world_size} process(es) cannot be divided by parallel.tp={tp} x parallel.pp={pp}; "
            f"start a multiple of {tp * pp} processes or change the layout"
        )
    return None


def global_batch_fits_data_parallel(config: Config, world_size: int) -> str | None:
    """Every data-parallel rank takes the same number of micro batches a step."""
    dp = world_size // (config.parallel.tp * config.parallel.pp)
    micro, batch = config.train.micro_batch, config.train.global_batch
    if batch % (micro * dp):
        return (
            f"train.global_batch={batch} is not divisible by train.micro_batch={micro} x {dp} data-parallel ranks; "
            f"lower train.micro_batch, or use a multiple of {micro * dp}"
        )
    return None


def sequence_fits_shards(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """The model's sequence is the shards' or a whole fraction of it."""
    sequence = config.model.sequence_length
    for manifest in (dataset.manifest for dataset in datasets):
        stored = manifest.sequence_length
        if sequence > stored:
            return (
                f"model.sequence_length={sequence} is longer than the shards' {stored} in {manifest.folder.where}; "
                f"lower it or build shards with --sequence-length {sequence}"
            )
        if stored % sequence:
            return (
                f"model.sequence_length={sequence} does not divide the shards' {stored} in {manifest.folder.where}; "
                f"use a divisor or build shards with --sequence-length {sequence}"
            )
    return None


def data_sets_have_names_of_their_own(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """Curves and messages tell data sets apart."""
    seen: set[str] = set()
    for dataset in datasets:
        if dataset.name in seen:
            return f"two of data.datasets are called {dataset.name}; give one of them another name in data.datasets"
        seen.add(dataset.name)
    return None


def data_sets_differ(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """A data set takes part once, so that none of its samples comes twice in an epoch."""
    first: dict[str, Dataset] = {}
    for dataset in datasets:
        other = first.setdefault(dataset.manifest.fingerprint, dataset)
        if other is not dataset:
            return (
                f"data.datasets: {other.name} and {dataset.name} are the same data set "
                f"{dataset.manifest.fingerprint[:12]}; remove one, and raise the other's weight"
            )
    return None


def tokenizers_are_the_same(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """A token means the same in every data set."""
    one, *others = datasets
    for other in others:
        if _tokens_of(other) != _tokens_of(one):
            return (
                f"data.datasets: {one.name} was built with the tokenizer {one.manifest.tokenizer_sha256[:12]}, "
                f"{other.name} with {other.manifest.tokenizer_sha256[:12]}; build both with the same"
            )
    return None


def _tokens_of(dataset: Dataset) -> tuple[str, int, int]:
    manifest = dataset.manifest
    return manifest.tokenizer_sha256, manifest.vocab_size, manifest.eod_id


def vocabulary_fits_tokenizer(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """The embedding has a row for every piece of the tokenizer."""
    vocab, manifest = config.model.vocab_size, datasets[0].manifest
    if vocab is not None and vocab < manifest.vocab_size:
        return (
            f"model.vocab_size={vocab} is smaller than the tokenizer's {manifest.vocab_size} in "
            f"{manifest.folder.where}; raise it or leave it out"
        )
    return None


def validation_has_samples(config: Config, datasets: Sequence[Dataset]) -> str | None:
    """A run that validates has held-out samples."""
    if config.validation.every and not any("validation" in dataset.manifest.splits for dataset in datasets):
        where = ", ".join(dataset.manifest.folder.where for dataset in datasets)
        return f"{where} has no validation split; set validation.every=0 or build shards with one"
    return None


ConfigRule = Callable[[Config], str | None]
LayoutRule = Callable[[Config, int], str | None]
DataRule = Callable[[Config, Sequence[Dataset]], str | None]

CONFIG_RULES: Sequence[ConfigRule] = (
    sizes_are_positive,
    heads_divide_hidden_size,
    rope_needs_an_even_head_width,
    dropout_is_a_share,
    z_loss_is_a_weight,
    query_groups_divide_heads,
    heads_divide_over_tp,
    ffn_divides_over_tp,
    sequence_parallel_needs_tp,
    layers_divide_over_pp,
    scheme_is_known,
    residual_settings_fit_the_scheme,
    residual_numbers_are_positive,
    clamp_is_within_half_a_turn,
    saved_output_shows_the_update,
    micro_batch_divides_global_batch,
    schedule_fits_the_run,
    mode_reads_what_is_named,
    data_are_named_once,
    stream_has_places_that_can_be_read,
    stream_does_not_change,
    stream_has_held_out_shards,
    stream_knows_no_token_counts,
    what_is_kept_beside_the_last_can_be_told,
    run_has_a_folder,
)
LAYOUT_RULES: Sequence[LayoutRule] = (
    world_size_fits_model_parallel,
    global_batch_fits_data_parallel,
    stream_has_a_shard_for_every_rank,
)
DATA_RULES: Sequence[DataRule] = (
    data_sets_have_names_of_their_own,
    data_sets_differ,
    tokenizers_are_the_same,
    sequence_fits_shards,
    vocabulary_fits_tokenizer,
    validation_has_samples,
)


def check_config(config: Config) -> None:
    """Raise UserError with the first broken rule on the settings alone."""
    _raise_first(rule(config) for rule in CONFIG_RULES)


def check_layout(config: Config, world_size: int) -> None:
    """Raise UserError with the first broken rule on the number of processes."""
    _raise_first(rule(config, world_size) for rule in LAYOUT_RULES)


def check_data(config: Config, datasets: Sequence[Dataset]) -> None:
    """Raise UserError with the first broken rule on the data."""
    _raise_first(rule(config, datasets) for rule in DATA_RULES)


def _raise_first(messages: Iterable[str | None]) -> None:
    for message in messages:
        if message is not None:
            raise UserError(message)
