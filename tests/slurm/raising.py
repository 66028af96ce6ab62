"""Python as the launcher starts it, except that global rank 1 has a defect: it raises at step 5."""

import os
import runpy
import sys

if __name__ == "__main__":
    assert sys.argv[1] == "-m"
    module, sys.argv[:] = sys.argv[2], sys.argv[2:]
    if os.environ["SLURM_PROCID"] == "1":
        from pretrain.recovery.guard import SpikeGuard
        from pretrain.state import TrainState

        learning_rate = SpikeGuard.learning_rate

        def broken(guard: SpikeGuard, state: TrainState) -> float:
            if state.step == 5:
                raise RuntimeError("a defect on purpose")
            return learning_rate(guard, state)

        SpikeGuard.learning_rate = broken  # type: ignore[method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
