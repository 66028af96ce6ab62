"""Mistakes that the user can mend, and how a command line tells of them."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from pretrain.redaction import redact


class UserError(Exception):
    """A mistake in the user's input, told in one line: what is wrong, where, what to change.

    Command lines print ``error: <message>``, without passwords and tokens of URLs, and exit with status 2, without a
    traceback.
    """


class SharedError(UserError):
    """A UserError that all processes of a job raise alike, so that one of them tells it for all."""


def run_cli(
    main: Callable[[], None],
    speaks: Callable[[BaseException], bool] = lambda error: True,
    end: Callable[[int, BaseException | None], NoReturn] = lambda status, error: sys.exit(status),
) -> NoReturn:
    """Run a command's ``main`` and end the process: status 0, or 2 and one line on stderr after a UserError.

    An interrupt from the keyboard ends it with status 130, output that nobody reads any more with status 1. Any other
    exception is a defect of ours and keeps its traceback; its status is 1.

    Args:
        speaks: whether this process tells of an error; one of several that make the same mistake is enough.
        end: ends the process, with this status and because of this error.
    """
    try:
        main()
    except UserError as error:
        if speaks(error):
            print("error: " + redact(" ".join(str(error).splitlines())), file=sys.stderr)
        end(2, error)
    except KeyboardInterrupt as interrupt:
        if speaks(interrupt):
            print("interrupted", file=sys.stderr)
        end(130, interrupt)
    except BrokenPipeError as error:
        # Whoever read our output, such as `head`, has had enough; Python would complain once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end(1, error)
    except Exception as error:
        traceback.print_exc()
        end(1, error)
    end(0, None)
