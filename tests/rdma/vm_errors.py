"""Ways in which the virtual machine can fail to run a command, each with its exit status."""

import enum


class Failure(enum.IntEnum):
    """Exit statuses of `vm.py` that are not the command's.

    Programs rarely use these values; 124 is the status of `timeout(1)`.
    """

    NOT_PREPARED = 120
    """The host lacks a package, or the kernel could not be downloaded."""
    NOT_BOOTED = 121
    """The guest ended, or was ended, before it started the command."""
    PANIC = 122
    """The guest's kernel panicked while the command ran."""
    LOST = 123
    """The guest ended during the command, without a panic and without an exit status."""
    TIMED_OUT = 124
    """The command exceeded its time limit."""


class VmError(Exception):
    """The command could not be run to its end.

    Attributes:
        failure: which way it failed; its value is the exit status of `vm.py`.
    """

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure
