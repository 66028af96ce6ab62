"""kill -9 at any change of the file system."""

import os
import signal
import sys
from collections.abc import Callable

_CHANGES = ("os.rename", "os.remove", "os.truncate", "os.link", "os.symlink", "os.mkdir", "shutil.copyfile")


def killed_after(changes: int, work: Callable[[], object]) -> bool:
    """Do the work in a child that kills itself after so many changes of the file system; whether it came to that."""
    child = os.fork()
    if child == 0:
        counted = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal counted
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if writes or event in _CHANGES:
                counted += 1
                if counted > changes:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
