"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in the user's input, told in one line: what is wrong, where, what to change.

    Command lines print ``error: <message>`` and exit with status 2, without a traceback.
    """
