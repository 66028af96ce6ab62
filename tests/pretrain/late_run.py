"""``python -m pretrain`` of a run whose processes are slow to start, so that another run saves in the meantime.

``SAVED TO train CONFIG ...``: the checkpoint SAVED appears as TO between the look at the run folder and its lock.
"""

import sys
from pathlib import Path
from typing import Any

from pretrain import parallel
from pretrain.__main__ import main
from pretrain.errors import run_cli


def start_late(saved: Path, to: Path) -> None:
    """Have the other run save when the process groups start."""
    start = parallel.start

    def late(*arguments: Any) -> parallel.Place:
        saved.rename(to)
        return start(*arguments)

    parallel.start = late


if __name__ == "__main__":
    start_late(Path(sys.argv.pop(1)), Path(sys.argv.pop(1)))
    run_cli(main)
