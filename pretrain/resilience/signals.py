"""Signals that end a run in order: at the next step boundary, with a checkpoint.

SIGUSR1 comes from a batch system some time before it ends the job, SIGTERM when it does so or when somebody kills the
process, SIGINT from Ctrl-C. A batch system may repeat its signals: that changes nothing. A second Ctrl-C ends at once.
"""

import os
import signal
import time
from types import FrameType

from pretrain.resilience.wishes import Stop

_HINT = b"\nstopping after this step, with a checkpoint; Ctrl-C again stops at once, without one\n"


class Signals:
    """What this process was told.

    Attributes:
        stop: whether to stop, and why.
        name: of the signal.
        received_at: seconds since the epoch.
    """

    def __init__(self) -> None:
        """Take note of SIGUSR1 from now on, for it may come while the program still loads."""
        self.stop = Stop.NO
        self.name = ""
        self.received_at: float | None = None
        self._speaks = False
        signal.signal(signal.SIGUSR1, self._end)

    def arm(self, speaks: bool) -> None:
        """Training begins: from now on there is something to save, so SIGTERM and Ctrl-C wait for it too.

        Args:
            speaks: whether this process answers Ctrl-C with a line.
        """
        self._speaks = speaks
        signal.signal(signal.SIGTERM, self._end)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a job in a shell's background is not interrupted
            signal.signal(signal.SIGINT, self._interrupt)

    @staticmethod
    def rest() -> None:
        """All is saved: what the batch system still says must not kill this process while it ends."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._note(Stop.SIGNAL, number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stop == Stop.INTERRUPT:
            raise KeyboardInterrupt
        self._note(Stop.INTERRUPT, number)
        if self._speaks:
            os.write(2, _HINT)  # print() may itself be what was interrupted

    def _note(self, stop: Stop, number: int) -> None:
        if stop > self.stop:
            self.stop = stop
            self.name = signal.Signals(number).name
            self.received_at = self.received_at or time.time()
