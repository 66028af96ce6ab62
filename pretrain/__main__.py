"""``python -m pretrain COMMAND ...``; the commands are in :mod:`pretrain.commands`."""

import os
import sys
from typing import NoReturn

from pretrain.commands import parse
from pretrain.errors import SharedError, run_cli
from pretrain.resilience.verdict import leave_verdict


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


def _end(status: int, error: BaseException | None) -> NoReturn:
    if error is not None:
        leave_verdict(requeue=False, reason=f"{type(error).__name__}: {error}")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        # Taking groups down would wait for the other ranks, and these wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run_cli(main, _speaks, _end)
