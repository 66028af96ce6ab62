"""Two ranks, one of which fails: prints what each of them got."""

import datetime
import os

import torch.distributed as dist

from pretrain.errors import SharedError, UserError
from pretrain.together import Together


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    global_rank = int(os.environ["RANK"])
    together = Together(30)

    def read(failing: tuple[int, ...]) -> int | None:
        if global_rank in failing:
            raise UserError(f"rank {global_rank} fails")
        return global_rank or None

    for failing in ((), (1,), (0, 1), ()):
        try:
            print(together.do(lambda failing=failing: read(failing)))
        except SharedError as error:
            print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
