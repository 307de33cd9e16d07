"""Command line entry point; each command is a module, imported when the command is called."""

from importlib import import_module
from typing import Any

import click

from aioverbs.cli.common import Status, report_error

__all__ = ["main"]

# The module `aioverbs.cli.NAME` defines the command NAME. At its top, such a module imports neither rich nor the
# compiled core, only click, `common` and other light modules; the command imports the rest when it is called.
COMMANDS = ("bench", "completion", "demo", "devices", "doctor", "ping", "top")

_STATUSES = """\b
Exit status:
  0    success
  1    negative result: device unusable, answers lost, wrong bytes
  2    invalid command line
  3    device, peer or process not found or unreachable
  4    failure; a line on standard error gives the reason
  130  interrupted by Ctrl-C before there was a result
"""


class _Commands(click.Group):
    """Group that imports a command's module when click looks up the command.

    If the command raises an `Exception` or KeyboardInterrupt, `report_error` prints that, and the process exits with
    the status that `report_error` returns. With ``--traceback``, the exception propagates unchanged. Click's own
    exceptions and BrokenPipeError always do so, because click handles them.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"aioverbs.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these; BrokenPipeError: the reader of the output is gone
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params["traceback"]:
                raise
            ctx.exit(report_error(error))


@click.group(cls=_Commands, epilog=_STATUSES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="aioverbs")
def main(traceback: bool) -> None:
    """RDMA for asyncio."""


assert click.UsageError.exit_code == Status.USAGE
