"""How the virtual machine can fail to run a command, each with an exit status of its own."""

import enum


class Failure(enum.IntEnum):
    """Exit statuses of `vm.py` when they are not the command's own.

    The values stand where programs rarely put theirs; 124 is what `timeout(1)` says.
    """

    NOT_PREPARED = 120
    """The host lacks a package, or the kernel could not be fetched."""
    NOT_BOOTED = 121
    """The guest ended, or was ended, before it could start the command."""
    PANIC = 122
    """The guest's kernel died while the command ran."""
    LOST = 123
    """The guest ended during the command, without a panic and without its exit status."""
    TIMED_OUT = 124
    """The command took longer than it was given."""


class VmError(Exception):
    """The command could not be run to its end.

    Attributes:
        failure: which way it failed; its value is the exit status of `vm.py`.
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure
