"""A process for the tests of the launcher: prints its environment, then ends, fails or hangs as told."""

import os
import sys
import time

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "DS_ACCELERATOR")

if __name__ == "__main__":
    print(*(os.environ[name] for name in VARIABLES), *sys.argv[1:])
    if "fail" in sys.argv and os.environ["RANK"] == "1":
        sys.exit("told to fail")
    if "fail" in sys.argv or "hang" in sys.argv:
        time.sleep(600)
