"""What ``growth_by`` says of a known use of memory, in a process where nothing else comes and goes."""

import numpy as np

from tools.bench.data_memory import growth_by

SIZE = 64 << 20


def work() -> np.ndarray:
    np.ones(SIZE, dtype=np.uint8)  # released at once
    return np.ones(SIZE // 2, dtype=np.uint8)


growth, kept = growth_by(work)
assert kept.nbytes == SIZE // 2
# The kernel counts pages in batches.
assert 0.95 * SIZE <= growth.peak < 1.25 * SIZE, growth
assert 0.45 * SIZE <= growth.held < 0.75 * SIZE, growth
again, _ = growth_by(lambda: None)
assert again.peak < SIZE // 4, f"the peak before was not forgotten: {again}"
print("all as it should be")
