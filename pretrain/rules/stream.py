"""Rules about ``data.mode=stream``; see :mod:`pretrain.rules`, which checks them."""

from pretrain.config import Config
from pretrain.data.places import expand_places
from pretrain.errors import UserError

_STREAM_SETTINGS = ("urls", "validation_urls", "tokenizer", "eod_id")
_SHARD_SETTINGS = ("manifest", "datasets")


def mode_reads_what_is_named(config: Config) -> str | None:
    """What is given belongs to the mode."""
    data = config.data
    if data.mode == "shards":
        given = [name for name in _STREAM_SETTINGS if getattr(data, name) not in ((), None)]
        return f"data.{given[0]} belongs to data.mode=stream; set that, or remove it" if given else None
    given = [name for name in _SHARD_SETTINGS if getattr(data, name) not in ((), None)]
    if given:
        return f"data.{given[0]} belongs to data.mode=shards, and data.mode=stream reads data.urls; remove either"
    missing = [name for name in ("urls", "tokenizer") if not getattr(data, name)]
    return f"data.{missing[0]} is missing, which data.mode=stream needs; give it" if missing else None


def stream_has_places_that_can_be_read(config: Config) -> str | None:
    """Shards are named by paths and URLs, each once, and none for both training and validation."""
    if config.data.mode != "stream":
        return None
    try:
        places = expand_places(config.data.urls, "data.urls")
        held_out = expand_places(config.data.validation_urls, "data.validation_urls")
    except UserError as error:
        return str(error)
    shared = set(places) & set(held_out)
    return f"{min(shared)} is both in data.urls and in data.validation_urls; remove it from one" if shared else None


def stream_does_not_change(config: Config) -> str | None:
    """There are no stages in a stream."""
    if config.data.mode == "stream" and config.data.on_change != "refuse":
        return (
            f"data.on_change={config.data.on_change} needs data.mode=shards: a stream goes on with the shards that it "
            "began with; remove it"
        )
    return None


def stream_has_held_out_shards(config: Config) -> str | None:
    """A streaming run that validates names what it validates on."""
    if config.data.mode == "stream" and config.validation.every and not config.data.validation_urls:
        return (
            f"validation.every={config.validation.every} needs held-out shards in data.mode=stream; name them by "
            "data.validation_urls or set validation.every=0"
        )
    return None


def stream_knows_no_token_counts(config: Config) -> str | None:
    """What starts at the log token frequencies needs somebody to have counted tokens."""
    if config.data.mode == "stream" and config.model.output_bias == "unigram":
        return (
            "model.output_bias=unigram needs token counts, which nobody has in data.mode=stream; set "
            "model.output_bias=learned, or build shards, whose manifest has them"
        )
    return None


def stream_has_a_shard_for_every_rank(config: Config, world_size: int) -> str | None:
    """Every data-parallel rank reads shards of its own."""
    if config.data.mode != "stream" or stream_has_places_that_can_be_read(config):
        return None
    dp = world_size // config.parallel.ranks_of_a_replica
    shards = len(expand_places(config.data.urls, "data.urls"))
    if shards < dp:
        return (
            f"data.urls name {shards} shard(s), but each of the {dp} data-parallel ranks reads its own in "
            "data.mode=stream; cut the text into more shards or start fewer processes"
        )
    return None
