"""The command line: each command is a file of its own, which is loaded when it is called."""

from importlib import import_module
from typing import Any

import click

from aioverbs.cli.common import Status, report

__all__ = ["main"]

# Of each one, `aioverbs.cli.NAME` has the command NAME. Such a file imports at its top no more than click and
# `common`, nor rich or the compiled core: what the command does it imports when it is called.
COMMANDS = ("bench", "completion", "demo", "devices", "doctor", "ping", "top")

_STATUSES = """\b
Exit status:
  0    it was done, and what was asked is so
  1    it was done, and what was asked is not so: no usable device, answers lost
  2    the command line is wrong
  3    what was named is not there, or cannot be reached: device, peer, process
  4    it could not be done: the line on standard error says why
  130  Ctrl-C, before there was anything to tell
"""


class _Commands(click.Group):
    """Commands by their names, and what becomes of their errors."""

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
            raise  # click's own, as is that nobody reads what is printed
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params["traceback"]:
                raise
            ctx.exit(report(error))


@click.group(cls=_Commands, epilog=_STATUSES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show all of an error, where the program was and how it came there.")
@click.version_option(package_name="aioverbs")
def main(traceback: bool) -> None:
    """RDMA for asyncio."""


assert click.UsageError.exit_code == Status.USAGE
