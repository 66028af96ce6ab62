"""``python -m pretrain COMMAND ...``; the commands are in :mod:`pretrain.commands`."""

import os
import sys

from pretrain.commands import parse
from pretrain.errors import SharedError, run_cli


def main() -> None:
    """Parse the command line and start the command that it names."""
    command, given = parse()
    # Megatron-core overlaps tensor-parallel communication only then; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    command.run(given)


def _speaks(error: BaseException) -> bool:
    """Before process groups start all processes find the same mistake; later one may be alone with it."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return local_rank == "0"
    return distributed.get_rank() == 0 or not isinstance(error, (SharedError, KeyboardInterrupt))


if __name__ == "__main__":
    run_cli(main, _speaks)
