"""Rules that relate settings to one another, to the world size and to the data: one small function each.

A rule returns None when it is kept, else one line that names the settings and says what to change. All are checked
before any process group starts.
"""

from collections.abc import Callable, Iterable, Sequence

from pretrain.config import Config
from pretrain.datasets import Dataset
from pretrain.errors import UserError
from pretrain.rules.data import (
    data_are_named_once,
    data_sets_differ,
    data_sets_have_names_of_their_own,
    sequence_fits_shards,
    tokenizers_are_the_same,
    validation_has_samples,
    vocabulary_fits_tokenizer,
)
from pretrain.rules.layout import (
    compiled_layers_are_whole,
    divided_gradients_need_one_stage,
    ffn_divides_over_tp,
    global_batch_fits_data_parallel,
    heads_divide_over_tp,
    layers_divide_over_pp,
    sequence_divides_over_cp,
    sequence_parallel_needs_tp,
    virtual_stages_fill_their_rounds,
    virtual_stages_need_a_pipeline,
    world_size_fits_model_parallel,
)
from pretrain.rules.model import (
    clamp_is_within_half_a_turn,
    dropout_is_a_share,
    heads_divide_hidden_size,
    query_groups_divide_heads,
    residual_numbers_are_positive,
    residual_settings_fit_the_scheme,
    rope_needs_an_even_head_width,
    saved_output_shows_the_update,
    scheme_is_known,
    sizes_are_positive,
    te_takes_whole_samples,
    z_loss_is_a_weight,
)
from pretrain.rules.monitor import profile_is_within_the_run, profiled_ranks_exist
from pretrain.rules.stream import (
    mode_reads_what_is_named,
    stream_does_not_change,
    stream_has_a_shard_for_every_rank,
    stream_has_held_out_shards,
    stream_has_places_that_can_be_read,
    stream_knows_no_token_counts,
)
from pretrain.rules.training import (
    a_lower_rate_lasts,
    a_rollback_has_where_to_go,
    decay_fits_the_run,
    micro_batch_divides_global_batch,
    rampup_ends_in_the_global_batch,
    run_has_a_folder,
    schedule_fits_the_run,
    spikes_are_told_before_they_are_acted_on,
    what_is_kept_beside_the_last_can_be_told,
)

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
    sequence_divides_over_cp,
    sequence_parallel_needs_tp,
    virtual_stages_need_a_pipeline,
    layers_divide_over_pp,
    divided_gradients_need_one_stage,
    compiled_layers_are_whole,
    te_takes_whole_samples,
    scheme_is_known,
    residual_settings_fit_the_scheme,
    residual_numbers_are_positive,
    clamp_is_within_half_a_turn,
    saved_output_shows_the_update,
    micro_batch_divides_global_batch,
    rampup_ends_in_the_global_batch,
    schedule_fits_the_run,
    decay_fits_the_run,
    mode_reads_what_is_named,
    data_are_named_once,
    stream_has_places_that_can_be_read,
    stream_does_not_change,
    stream_has_held_out_shards,
    stream_knows_no_token_counts,
    what_is_kept_beside_the_last_can_be_told,
    profile_is_within_the_run,
    spikes_are_told_before_they_are_acted_on,
    a_rollback_has_where_to_go,
    a_lower_rate_lasts,
    run_has_a_folder,
)
LAYOUT_RULES: Sequence[LayoutRule] = (
    world_size_fits_model_parallel,
    global_batch_fits_data_parallel,
    virtual_stages_fill_their_rounds,
    stream_has_a_shard_for_every_rank,
    profiled_ranks_exist,
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
