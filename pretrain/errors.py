"""Mistakes that the user can mend, and how a command line tells of them."""

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """A mistake in the user's input, told in one line: what is wrong, where, what to change.

    Command lines print ``error: <message>`` and exit with status 2, without a traceback.
    """


def run_cli(main: Callable[[], None]) -> NoReturn:
    """Run a command's ``main`` and end the process: status 0, or 2 and one line on stderr after a UserError.

    Any other exception is a defect of ours and keeps its traceback.
    """
    try:
        main()
    except UserError as error:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
