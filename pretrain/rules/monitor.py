"""Rules about what is measured; see :mod:`pretrain.rules`, which checks them."""

from pretrain.config import Config


def profile_is_within_the_run(config: Config) -> str | None:
    """A window that is asked for is reached."""
    profile, steps = config.profile, config.train.steps
    if profile.window and profile.first > steps:
        return f"profile.first={profile.first} is beyond train.steps={steps}; lower it, or leave out profile.window"
    return None


def profiled_ranks_exist(config: Config, world_size: int) -> str | None:
    """Every process that is to be traced is there."""
    if not config.profile.window:
        return None
    missing = [number for number in config.profile.global_ranks if not 0 <= number < world_size]
    return (
        f"profile.global_ranks has {missing[0]}, but the {world_size} process(es) are 0 to {world_size - 1}; change it"
        if missing
        else None
    )
