"""The exit statuses of the command."""

from enum import IntEnum

__all__ = ["Status"]


class Status(IntEnum):
    """Exit statuses of all commands."""

    OK = 0
    """The command succeeded, and the checked condition holds."""

    NO = 1
    """The command succeeded, and the checked condition does not hold: a device is unusable, answers were lost."""

    USAGE = 2
    """The command line is invalid. Same value as `click.UsageError.exit_code`."""

    NOT_FOUND = 3
    """A device, peer or process named by the caller does not exist or is unreachable."""

    FAILED = 4
    """The command failed; a line on standard error gives the reason."""

    INTERRUPTED = 130
    """Ctrl-C interrupted the command before it had a result."""
