"""A process that steps, waits with patience, and then hangs; its stacks go to the folder given."""

import sys
import threading
import time
from pathlib import Path

from pretrain.config import WatchdogSettings
from pretrain.resilience import watchdog


def main() -> None:
    watchdog.GRACE_SECONDS = 0.2
    watchdog.WRITE_SECONDS = 1.0
    dog = watchdog.Watchdog(WatchdogSettings(factor=4, floor_seconds=0.4), global_rank=3)
    dog.traces = Path(sys.argv[1])
    # The last one is longer than usual, but not longer than the floor.
    for seconds in (0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.2):
        dog.expect_step()
        time.sleep(seconds)
        dog.step_ended(seconds)
    with dog.patience():
        time.sleep(0.6)
    print("all is well", flush=True)
    dog.expect_step()
    hang_in_a_collective()


def hang_in_a_collective() -> None:
    threading.Event().wait()


if __name__ == "__main__":
    main()
