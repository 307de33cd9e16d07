"""The command line."""

import os
import sys

import click

from aioverbs.cli.diagnosis import diagnose
from aioverbs.cli.doctor import as_json, as_text, status_of
from aioverbs.cli.machine import look

__all__ = ["main"]


@click.group()
@click.version_option(package_name="aioverbs")
def main() -> None:
    """RDMA for asyncio."""


@main.command()
@click.argument("device", required=False)
@click.option("--json", "machine_readable", is_flag=True, help="Print all that was found as JSON.")
def doctor(device: str | None, machine_readable: bool) -> None:
    """Tell which RDMA devices can be used, why others cannot, and which command mends that.

    The exit status is 0 where DEVICE, or without one any RDMA device, can be used; 1 where it is there and cannot be;
    3 where there is none.
    """
    machine = look()
    diagnosis = diagnose(machine)
    status = status_of(diagnosis, device)
    if machine_readable:
        click.echo(as_json(machine, diagnosis, status))
    else:
        for line in as_text(machine, diagnosis):
            click.echo(line, color=False if os.environ.get("NO_COLOR") else None)
    sys.exit(status)
