"""What a plan warns of: one line each, with what to change."""

from collections.abc import Callable, Sequence

from megatron_ext import scheme_of
from pretrain.plan.layouts import FEW_TOKENS, Layout, Machines, tokens_of_a_gpu
from pretrain.plan.memory import USABLE, dtype_of
from pretrain.plan.timing import bubble_share
from pretrain.recipe import advice, recipe_lr

_LARGEST_BUBBLE = 0.1


def fits(layout: Layout, machines: Machines) -> str | None:
    """A rank's memory fits its GPU."""
    needed, gpu = layout.memory.total / 2**30, machines.gpu
    if layout.memory.total <= machines.usable_bytes:
        return None
    return (
        f"does not fit: {needed:.1f} GiB needed, {machines.usable_bytes / 2**30:.1f} GiB usable on {gpu.name} "
        f"({USABLE:.0%} of {gpu.memory_gib:g})"
    )


def bubble_is_small(layout: Layout, machines: Machines) -> str | None:
    """A pipeline's stages mostly work."""
    parallel = layout.config.parallel
    share = bubble_share(layout.config, machines.gpus // parallel.ranks_of_a_replica)
    if share <= _LARGEST_BUBBLE:
        return None
    return (
        f"pipeline stages wait {share:.0%} of a step; raise train.global_batch, lower train.micro_batch or parallel.pp"
    )


def batch_feeds_the_gpus(layout: Layout, machines: Machines) -> str | None:
    """A micro batch is large enough for large matrix products."""
    config = layout.config
    tokens = tokens_of_a_gpu(config)
    if tokens >= FEW_TOKENS:
        return None
    return (
        f"a micro batch has {tokens:,} tokens a GPU (over parallel.tp and cp), too few to come near the stated MFU; "
        f"raise train.micro_batch or lower parallel.tp or cp"
    )


def tp_stays_within_a_node(layout: Layout, machines: Machines) -> str | None:
    """Tensor parallelism needs the links within a machine."""
    tp, gpu = layout.config.parallel.tp, machines.gpu
    if tp <= gpu.per_node:
        return None
    return f"parallel.tp={tp} spans machines of {gpu.per_node} {gpu.name}; its all-reduces then cross the network"


def precision_is_the_tables(layout: Layout, machines: Machines) -> str | None:
    """The table's peaks are for bf16."""
    if layout.config.train.precision == "bf16":
        return None
    return "train.precision=fp32: the times are bf16's; fp32 takes several times as long"


def the_update_is_on_the_gpu(layout: Layout, machines: Machines) -> str | None:
    """The step's time counts what a GPU does."""
    config = layout.config
    if not config.zero.offload_optimizer:
        return None
    sharing = machines.gpus // config.parallel.ranks_of_a_replica * config.parallel.cp
    held = layout.memory.weights / dtype_of(config).itemsize * (sharing if config.zero.stage == 3 else 1)
    # Masters, both moments and the gradient, in fp32.
    host = 16 * held / (sharing if config.zero.stage else 1) / 2**30
    return f"zero.offload_optimizer=true: the times leave out the update in host memory, {host:.1f} GiB of it a rank"


def lr_is_near_the_recipe(layout: Layout, machines: Machines) -> str | None:
    """The learning rate is about what the recipe gives this scheme and width."""
    config = layout.config
    scheme = config.model.residual.scheme
    usual = recipe_lr(scheme, config.model.hidden_size)
    factor = config.optimizer.lr / usual
    if 0.4 <= factor <= 2.5:
        return None
    return (
        f"optimizer.lr={config.optimizer.lr:g} is {factor:.2g} times the recipe's {usual:g} for {scheme} at this width"
    )


Warning_ = Callable[[Layout, Machines], str | None]

WARNINGS: Sequence[Warning_] = (
    fits,
    bubble_is_small,
    batch_feeds_the_gpus,
    tp_stays_within_a_node,
    precision_is_the_tables,
    the_update_is_on_the_gpu,
    lr_is_near_the_recipe,
)


def warnings_of(layout: Layout, machines: Machines) -> list[str]:
    """All that apply."""
    residual = layout.config.model.residual
    found = [line for warning in WARNINGS if (line := warning(layout, machines))]
    config = layout.config
    counted = config.data.mode == "shards"
    return found + advice(residual.scheme, scheme_of(residual).on_sphere, config.model.output_bias, counted)
