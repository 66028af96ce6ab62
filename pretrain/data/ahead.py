"""A thread that reads the next step's samples while the step runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import numpy.typing as npt

from pretrain.data.reader import Rows

Draws = npt.NDArray[np.int64]


class ReadAhead:
    """Calls ``read`` in one thread, one step ahead; what it raises there is raised where the rows are asked for.

    A context manager: the thread ends with it.
    """

    def __init__(self, read: Callable[[Draws], Rows]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._coming: tuple[Draws, Future[Rows]] | None = None

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, draws: Draws, following: Draws | None) -> Rows:
        """The rows of ``draws``; those of ``following``, if given, are read meanwhile.

        Draws that were announced but are not asked for are forgotten.
        """
        if self._coming is not None and np.array_equal(self._coming[0], draws):
            rows = self._coming[1]
        else:
            rows = self._thread.submit(self._read, draws)
        self._coming = None if following is None else (following, self._thread.submit(self._read, following))
        return rows.result()
