"""Rows of the benchmark `step` on two processes: started, fed with a word for each step, and heard.

As a module (``python -m tools.bench.step_ranks LAYOUT PRESET PRECISION KERNELS [MICRO_BATCH]``) it is one of the
processes: for each line on its standard input it takes a step and answers with a line of JSON, its share of the loss
(nats per token) and the seconds that it has computed so far.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from pretrain import parallel
from pretrain.errors import UserError
from pretrain.launch import free_port, read_launch
from tools.bench.contenders import GEONORM, WARM_UP_STEPS, Contender, random_batches, start_engine
from tools.bench.step import PRESETS

LAYOUTS = {"tp2": "parallel.tp=2", "dp2": "parallel.tp=1"}
"""Name of a row -> what its configuration sets."""


class TwoRanks:
    """Two processes, each with one thread, that take the same steps as one does: a context manager."""

    def __init__(self, layout: str, preset: str, precision: str, micro_batch: int | None, kernels: str) -> None:
        """Start them."""
        self._computed = 0.0
        self._layout = layout
        port = str(free_port())
        shape = [layout, preset, precision, kernels, *([] if micro_batch is None else [str(micro_batch)])]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *shape],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def __enter__(self) -> "TwoRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()  # each waits for the other before it ends
            if kind is not None:
                process.kill()
        for process in self._ranks:
            process.wait()

    def contender(self) -> Contender:
        """The row, warm; its memory is not measured."""
        first_loss = float(self.step())
        for _ in range(WARM_UP_STEPS - 1):
            self.step()
        return Contender(self.step, first_loss, 0, 0)

    def clock(self) -> float:
        """Seconds that both have computed, as of their last step."""
        return self._computed

    def step(self) -> torch.Tensor:
        """Both take a step; its loss.

        Raises:
            UserError: one of them ended.
        """
        answers = []
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        for process in self._ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise UserError(f"--two-ranks: a process of {self._layout} ended; its error stands above")
            answers.append(json.loads(line))
        self._computed = sum(computed for _, computed in answers)
        shares = [share for share, _ in answers]
        # Tensor-parallel ranks have the same loss each, the shares of data-parallel ones add up.
        return torch.tensor(sum(shares) if self._layout == "dp2" else shares[0])


def main(arguments: Sequence[str]) -> None:
    """One of the processes."""
    from tools.bench.step_timing import bench_config

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    layout, preset, precision, kernels, *micro_batch = arguments
    forced = LAYOUTS[layout], f"model.kernels={kernels}"
    config = bench_config(PRESETS[preset], precision, int(micro_batch[0]) if micro_batch else None, *forced)
    place = parallel.start(read_launch(), config.parallel, config.train.seed)
    batches = random_batches(config, place.device)[place.dp_rank :: place.dp_size]
    step = start_engine(config, GEONORM, place, batches)
    for _ in sys.stdin:
        answers.write(json.dumps([float(step()), time.process_time()]) + "\n")
        answers.flush()
    parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
