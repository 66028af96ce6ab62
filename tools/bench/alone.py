"""Benchmarks that time in one process of their own."""

from pretrain.errors import UserError
from pretrain.launch import Launch, read_launch


def launched_alone(name: str) -> Launch:
    """How this process was started, for the benchmark ``name``.

    Raises:
        UserError: it is one of several.
    """
    launch = read_launch()
    if launch.world_size != 1:
        raise UserError(f"{name} runs in one process, not in {launch.world_size}; start it without torchrun or srun")
    return launch
