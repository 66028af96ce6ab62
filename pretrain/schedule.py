"""What happens at which step, as functions of the step alone, so a resumed run needs no schedule state."""

import math

from pretrain.config import Config, OptimizerSettings


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of the update that follows ``step`` completed steps.

    Rises linearly to ``lr`` over the warmup, then falls along half a cosine to ``min_lr`` at the last update.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    remaining = steps - 1 - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / remaining) if remaining > 0 else 0.0
    return settings.min_lr + (settings.lr - settings.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether something that happens every ``every`` steps (0: never) and after the last one follows ``step``."""
    return step == steps or (every > 0 and step % every == 0)


def is_log_step(step: int, config: Config) -> bool:
    """Whether all that is known of the steps up to ``step`` is written out behind it.

    Checkpoints' and validations' steps are log steps too: what a resumed run will not repeat must be on disk by then.
    """
    periods = (config.logging.every, config.checkpoint.every, config.validation.every)
    return any(is_due(step, every, config.train.steps) for every in periods)
