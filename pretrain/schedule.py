"""What happens at which step, as functions of the step alone, so a resumed run needs no schedule state."""

import math
from collections.abc import Callable, Mapping

from pretrain.config import Config, OptimizerSettings

Shape = Callable[[float], float]
Height = Callable[[int, int, OptimizerSettings], float]
"""(completed steps, steps of the run, settings) -> where the rate stands between ``min_lr`` (0) and ``lr`` (1)."""


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Learning rate of the update that follows ``step`` completed steps of ``steps``; see OptimizerSettings."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    return settings.min_lr + (settings.lr - settings.min_lr) * _HEIGHTS[settings.schedule](step, steps, settings)


def decay_window(steps: int, settings: OptimizerSettings) -> tuple[int, int]:
    """The steps [first, end) of a run of ``steps`` in which the schedule ``wsd`` decays."""
    length = settings.decay_steps
    if length is None:
        length = max(1, steps // 10) if settings.decay_start is None else max(1, steps - settings.decay_start)
    start = steps - length if settings.decay_start is None else settings.decay_start
    return start, start + length


def _over_the_run(shape: Shape) -> Height:
    """From ``lr`` at the first update behind the warmup to ``min_lr`` at the last."""

    def height(step: int, steps: int, settings: OptimizerSettings) -> float:
        remaining = steps - 1 - settings.warmup_steps
        return shape(min(1.0, (step - settings.warmup_steps) / remaining) if remaining > 0 else 0.0)

    return height


def _at_the_end(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Every update of the decay lies below ``lr``, the last one at ``min_lr``."""
    first, end = decay_window(steps, settings)
    progress = min(1.0, (step + 1 - first) / (end - first))
    return SHAPES[settings.decay_shape or "linear"](progress) if progress > 0 else 1.0


SHAPES: Mapping[str, Shape] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Ways from 1 to 0 while the progress goes from 0 to 1."""

_HEIGHTS: Mapping[str, Height] = {
    "cosine": _over_the_run(SHAPES["cosine"]),
    "linear": _over_the_run(SHAPES["linear"]),
    "wsd": _at_the_end,
    "constant": lambda step, steps, settings: 1.0,
}


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether something that happens every ``every`` steps (0: never) and after the last one follows ``step``."""
    return step == steps or (every > 0 and step % every == 0)


def is_log_step(step: int, config: Config) -> bool:
    """Whether all that is known of the steps up to ``step`` is written out behind it.

    Checkpoints' and validations' steps are log steps too: what a resumed run will not repeat must be on disk by then.
    """
    periods = (config.logging.every, config.checkpoint.every, config.validation.every)
    return any(is_due(step, every, config.train.steps) for every in periods)
