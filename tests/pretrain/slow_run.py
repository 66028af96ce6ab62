"""``python -m pretrain`` of a run whose global rank 1 computes slowly, as a processor that is too hot does."""

import os
import time
from typing import Any

from pretrain.__main__ import main
from pretrain.errors import run_cli
from pretrain.passes import SchedulePasses

SECONDS = 0.5


def slow_down() -> None:
    """Have every pass through the model take so much longer."""
    run = SchedulePasses.run

    def slow(*arguments: Any) -> list[Any]:
        time.sleep(SECONDS)
        return run(*arguments)

    SchedulePasses.run = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        slow_down()
    run_cli(main)
