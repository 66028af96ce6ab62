"""Rules about a run's length, its checkpoints and its place; see :mod:`pretrain.rules`, which checks them."""

from pathlib import Path

from pretrain.config import Config
from pretrain.schedule import decay_window


def micro_batch_divides_global_batch(config: Config) -> str | None:
    """A step is a whole number of micro batches."""
    micro, batch = config.train.micro_batch, config.train.global_batch
    return (
        f"train.global_batch={batch} is not divisible by train.micro_batch={micro}; change either"
        if batch % micro
        else None
    )


def rampup_ends_in_the_global_batch(config: Config) -> str | None:
    """The batch grows from its start to the global batch in whole increments, each a whole number of micro batches."""
    train, rampup = config.train, config.train.rampup
    given = [name for name, value in rampup if value is not None]
    missing = [name for name, value in rampup if value is None]
    if given and missing:
        return f"train.rampup.{missing[0]} is missing beside train.rampup.{given[0]}; give start, increment and samples"
    if rampup.start is None or rampup.increment is None:
        return None
    if rampup.start >= train.global_batch or (train.global_batch - rampup.start) % rampup.increment:
        return (
            f"train.rampup.start={rampup.start} does not reach train.global_batch={train.global_batch} in steps of "
            f"train.rampup.increment={rampup.increment}; change one of them"
        )
    for name, size in (("start", rampup.start), ("increment", rampup.increment)):
        if size % train.micro_batch:
            return (
                f"train.rampup.{name}={size} is not divisible by train.micro_batch={train.micro_batch}; change either"
            )
    return None


def schedule_fits_the_run(config: Config) -> str | None:
    """The learning rate rises within the run and does not end above its peak."""
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps >= steps:
        return f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.steps={steps}; change either"
    if optimizer.min_lr > optimizer.lr:
        return f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}; lower it"
    return None


def decay_fits_the_run(config: Config) -> str | None:
    """The schedule wsd has its decay behind the warmup and within the run; no other schedule has one to set."""
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.schedule != "wsd":
        for name in ("decay_start", "decay_steps", "decay_shape"):
            if (value := getattr(optimizer, name)) is not None:
                return (
                    f"optimizer.{name}={value} belongs to optimizer.schedule=wsd, not to {optimizer.schedule}; set "
                    "that, or remove it"
                )
        return None
    start, end = decay_window(steps, optimizer)
    if start < optimizer.warmup_steps:
        return (
            f"optimizer.schedule=wsd decays from step {start} on, before the end of "
            f"optimizer.warmup_steps={optimizer.warmup_steps}; lower that or change optimizer.decay_start, decay_steps"
        )
    if end > steps:
        return (
            f"optimizer.schedule=wsd decays until step {end}, behind the last of train.steps={steps}; lower "
            "optimizer.decay_start or decay_steps, or raise train.steps"
        )
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


def spikes_are_told_before_they_are_acted_on(config: Config) -> str | None:
    """The bar for one score alone is no lower than that for several."""
    log, act = config.spikes.log, config.spikes.act
    return f"spikes.act={act:g} is below spikes.log={log:g}; raise it or lower the other" if act < log else None


def a_rollback_has_where_to_go(config: Config) -> str | None:
    """There will be checkpoints from before a spike, and samples can be skipped behind them."""
    if config.spikes.policy != "rollback":
        return None
    if config.data.mode == "stream":
        return (
            "spikes.policy=rollback skips samples, which data.mode=stream cannot; use spikes.policy=skip_step, or "
            "shards built by python -m tools.shards"
        )
    if not config.checkpoint.every:
        return "spikes.policy=rollback goes back to a checkpoint, but checkpoint.every=0 saves none; raise it"
    if config.checkpoint.keep_last == 1:
        return (
            "spikes.policy=rollback needs a checkpoint from before a spike, and the last one may be from within it: "
            "raise checkpoint.keep_last=1 to at least 2"
        )
    return None


def a_lower_rate_lasts(config: Config) -> str | None:
    """A factor on the learning rate needs steps to apply to, and a rollback to follow."""
    spikes = config.spikes
    if (spikes.lr_factor < 1) != (spikes.lr_steps > 0):
        return (
            f"spikes.lr_factor={spikes.lr_factor:g} and spikes.lr_steps={spikes.lr_steps} belong together: "
            "set both, or neither"
        )
    if spikes.lr_factor < 1 and spikes.policy != "rollback":
        return f"spikes.lr_factor={spikes.lr_factor:g} follows a rollback, but spikes.policy={spikes.policy}; remove it"
    return None


def run_has_a_folder(config: Config) -> str | None:
    """A run's files do not mix with those of the current folder."""
    return "run.dir is empty; name a folder for the run" if config.run.dir == Path() else None
