"""Shared parts of all commands: options, exit statuses, printing, and running coroutines.

Neither this module nor a command's module imports rich or the compiled core at its top. The command line therefore
starts fast, and `aioverbs doctor` works even if the core cannot be loaded.
"""

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from aioverbs._monitoring.jsonable import to_jsonable
from aioverbs._providers.sysfs import kernel_devices
from aioverbs.cli.status import Status

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Seconds",
    "Status",
    "UntilStopped",
    "console",
    "device_names",
    "json_option",
    "print_json",
    "report_error",
    "run",
    "runner",
    "write_line",
]

F = TypeVar("F", bound=Callable[..., Any])

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PIPE_COLUMNS = 1_000  # columns if the output is not a terminal, so that tables are not cut


# ---- Options and arguments


def json_option(command: F) -> F:
    """Add the option ``--json`` to a command and return the command; the flag is passed to it as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


class Seconds(click.FloatRange):
    """Parameter type of a finite number of seconds, a float. The arguments are those of `click.FloatRange`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a value to a number of seconds, which must be finite and in the range.

        :returns: the number, a float.
        :raises click.BadParameter: `value` is not a number, not finite, or outside the range.
        """
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"expected a finite number of seconds, got {seconds}", param, ctx)
        return seconds


def device_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the device names that begin with the text typed so far, for shell completion.

    The names are those of the kernel's devices and ``"soft0"``. No device is opened.

    :param incomplete: the text typed so far.
    """
    return [name for name in (*kernel_devices(), "soft0") if name.startswith(incomplete)]


# ---- Printing


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console for human-readable output. It uses colours only on a terminal, and only if NO_COLOR is not
    set.

    :param stderr: True to write to standard error instead of standard output.
    """
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")
    if not made.is_terminal:
        made.width = _PIPE_COLUMNS
    return made


def print_json(value: object, *, one_line: bool = False) -> None:
    """Print a value to standard output as JSON: dataclasses become objects, members of enumerations their names.

    :param value: the value.
    :param one_line: True to print the value without line breaks, for commands that print one value per line.
    :raises TypeError: JSON has no type for the value, or for a value in it; nothing is printed.
    :raises OSError: standard output cannot be written.
    """
    click.echo(json.dumps(to_jsonable(value), indent=None if one_line else 2))


# ---- Running


def run(main: Coroutine[Any, Any, Status]) -> NoReturn:
    """Run a command's coroutine on uvloop, or on asyncio if uvloop is not installed; exit with the status that the
    coroutine returns.

    :param main: the coroutine.
    :raises click.exceptions.Exit: the coroutine has returned. If it raises an exception, that propagates unchanged.
    """
    with runner() as event_loop_runner:
        status = event_loop_runner.run(main)
    click.get_current_context().exit(status)


def runner() -> asyncio.Runner:
    """Return a new `asyncio.Runner`, which the caller must close. It uses uvloop's event loop if uvloop is installed,
    otherwise asyncio's.
    """
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=new_event_loop)


def write_line(stdin: asyncio.StreamWriter, line: str) -> None:
    """Write a line to the standard input of another process, without waiting; do nothing if that pipe is already
    closed.

    :param stdin: the pipe to that process.
    :param line: the line, without the line break.
    """
    if not stdin.is_closing():  # write() on a closed pipe raises RuntimeError on uvloop, not on asyncio
        stdin.write(f"{line}\n".encode())


class UntilStopped:
    """Context manager whose block is cancelled by SIGINT or SIGTERM; the code after the block can print a summary.

    The first signal ends the block without an exception. A second Ctrl-C interrupts the program as usual. Use this in a
    coroutine on the main thread.

    :raises RuntimeError: on entering: no event loop is running in this thread.
    """

    def __enter__(self) -> None:
        import anyio

        self._loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        for signal_number in _STOP_SIGNALS:
            self._loop.add_signal_handler(signal_number, self._stop)

    def _stop(self) -> None:
        """Cancel the block and restore the default effect of SIGINT and SIGTERM."""
        self._release()
        self._scope.cancel()

    def _release(self) -> None:
        """Restore the default effect of SIGINT and SIGTERM."""
        for signal_number in _STOP_SIGNALS:
            self._loop.remove_signal_handler(signal_number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._release()
        return bool(self._scope.__exit__(kind, error, traceback))


def report_error(error: BaseException) -> Status:
    """Print an exception as one line on standard error and return the exit status of the command.

    If the exception is a group, only the first exception in it is printed. Nothing is printed for a KeyboardInterrupt
    or a cancellation. If the type of the exception is unexpected, the line also contains that type and the option that
    shows the traceback.

    :param error: the exception.
    :returns: INTERRUPTED for a KeyboardInterrupt or a cancellation; NOT_FOUND if a device, peer, process or library was
        not found or is unreachable; otherwise FAILED.
    """
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
        return Status.INTERRUPTED
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, _expected_errors()):
        text = f"{type(error).__name__}: {text} (aioverbs --traceback … shows where)"
    click.echo(f"aioverbs: {text}", err=True)
    return Status.NOT_FOUND if isinstance(error, _not_found_errors()) else Status.FAILED


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Return the types of exceptions that are caused by the environment or by arguments, not by a bug in aioverbs."""
    import anyio

    from aioverbs import errors

    completion = (errors.WorkCompletionError, errors.QueuePairStateError)
    return (OSError, ValueError, errors.DeviceNotFoundError, anyio.BrokenResourceError, *completion)


def _not_found_errors() -> tuple[type[BaseException], ...]:
    """Return the types of exceptions for which the exit status is `Status.NOT_FOUND`."""
    from aioverbs import errors

    return (ConnectionError, errors.DeviceNotFoundError, errors.LibraryNotFoundError, errors.UnreachableError)
