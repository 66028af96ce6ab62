"""Rules about the layout of processes; see :mod:`pretrain.rules`, which checks them."""

from pretrain.config import Config
from pretrain.rampup import batch_sizes


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
    tp, cp, sequence = config.parallel.tp, config.parallel.cp, config.model.sequence_length
    if tp == 1:
        return "parallel.sp=true needs parallel.tp of at least 2; raise parallel.tp or set parallel.sp=false"
    if sequence // cp % tp:
        over_cp = f" over parallel.cp={cp}" if cp > 1 else ""
        return (
            f"model.sequence_length={sequence}{over_cp} is not divisible by parallel.tp={tp}, which parallel.sp=true "
            f"needs"
        )
    return None


def sequence_divides_over_cp(config: Config) -> str | None:
    """Each context-parallel rank holds two chunks of every sample."""
    cp, sequence = config.parallel.cp, config.model.sequence_length
    if cp > 1 and sequence % (2 * cp):
        return f"model.sequence_length={sequence} is not divisible by 2 x parallel.cp={cp}; change either"
    return None


def layers_divide_over_pp(config: Config) -> str | None:
    """Each pipeline stage, virtual or not, holds the same number of layers."""
    layers, pp, vpp = config.model.num_layers, config.parallel.pp, config.parallel.vpp
    if layers % pp:
        return f"model.num_layers={layers} is not divisible by parallel.pp={pp}; change either"
    if layers % (pp * vpp):
        return (
            f"model.num_layers={layers} is not divisible by parallel.pp={pp} x parallel.vpp={vpp}; lower parallel.vpp"
        )
    return None


def virtual_stages_need_a_pipeline(config: Config) -> str | None:
    """Virtual stages interleave with those of other ranks."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    if vpp > 1 and pp == 1:
        return f"parallel.vpp={vpp} needs parallel.pp of at least 2; raise parallel.pp or set parallel.vpp=1"
    return None


def divided_gradients_need_one_stage(config: Config) -> str | None:
    """ZeRO 2 and 3 reduce gradients behind every micro batch, while a pipeline has several of them under way."""
    stage, pp = config.zero.stage, config.parallel.pp
    if stage >= 2 and pp > 1:
        return f"zero.stage={stage} does not go with parallel.pp={pp}; set zero.stage=1 or parallel.pp=1"
    return None


def compiled_layers_are_whole(config: Config) -> str | None:
    """One graph serves all micro batches, and the layer's weights are there when it runs."""
    if not config.train.compile:
        return None
    if config.zero.stage == 3:
        return (
            "train.compile=true does not go with zero.stage=3, which gathers weights within a layer; use another stage "
            "or remove it"
        )
    if config.model.dropout:
        return (
            f"train.compile=true does not go with model.dropout={config.model.dropout}, whose random numbers belong to "
            "each rank and step; remove either"
        )
    if config.data.separate_documents:
        return (
            "train.compile=true does not go with data.separate_documents=true: every length of document would be "
            "compiled; remove either"
        )
    return None


def world_size_fits_model_parallel(config: Config, world_size: int) -> str | None:
    """Every process belongs to one copy of the model."""
    tp, pp, cp, ranks = (
        config.parallel.tp,
        config.parallel.pp,
        config.parallel.cp,
        config.parallel.ranks_of_a_replica,
    )
    if world_size % ranks:
        over_cp = f" x parallel.cp={cp}" if cp > 1 else ""
        return (
            f"{world_size} process(es) cannot be divided by parallel.tp={tp} x parallel.pp={pp}{over_cp}; "
            f"start a multiple of {ranks} processes or change the layout"
        )
    return None


def virtual_stages_fill_their_rounds(config: Config, world_size: int) -> str | None:
    """The interleaved schedule takes micro batches in rounds of as many as there are pipeline stages."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    of_micro = config.train.micro_batch * (world_size // config.parallel.ranks_of_a_replica)
    for batch in batch_sizes(config.train) if vpp > 1 else []:
        if (micro := batch // of_micro) % pp:
            return (
                f"parallel.vpp={vpp} takes micro batches in rounds of parallel.pp={pp}, and a step of {batch} samples "
                f"has {micro} a data-parallel rank; use a multiple of {pp} by train.global_batch, train.rampup or "
                "train.micro_batch"
            )
    return None


def global_batch_fits_data_parallel(config: Config, world_size: int) -> str | None:
    """Every data-parallel rank takes the same number of micro batches a step."""
    dp = world_size // config.parallel.ranks_of_a_replica
    micro, batch = config.train.micro_batch, config.train.global_batch
    if batch % (micro * dp):
        return (
            f"train.global_batch={batch} is not divisible by train.micro_batch={micro} x {dp} data-parallel ranks; "
            f"lower train.micro_batch, or use a multiple of {micro * dp}"
        )
    for name in ("start", "increment"):
        size = getattr(config.train.rampup, name)
        if size is not None and size % (micro * dp):
            return (
                f"train.rampup.{name}={size} is not divisible by train.micro_batch={micro} x {dp} data-parallel ranks, "
                f"which share every batch; use a multiple of {micro * dp}"
            )
    return None
