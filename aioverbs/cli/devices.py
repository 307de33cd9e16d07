"""`aioverbs devices`: list this machine's devices with their state, native features and limits."""

from typing import TYPE_CHECKING

import click

from aioverbs.cli.common import Status, console, device_names, json_option, print_json, run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from aioverbs.cli.inventory import DeviceReport

__all__ = ["devices"]


@click.command(short_help="List devices and their native features.")
@click.argument("name", required=False, shell_complete=device_names)
@json_option
def devices(name: str | None, as_json: bool) -> None:
    """List devices with their ports and native features.

    With NAME, show only that device, with its GIDs and limits. The name of a software device with an address contains
    the address, as in soft0@10.0.0.1:7470.

    The exit status is 1 if NAME is unusable, and 3 if it does not exist.
    """
    run(_devices(name, as_json))


async def _devices(name: str | None, as_json: bool) -> Status:
    """Print one device, or all devices if ``name`` is None.

    :returns: the exit status; NO if the device called ``name`` is unusable.
    :raises DeviceNotFoundError: no device is called ``name``.
    """
    from aioverbs.cli.inventory import inspect_device, list_devices

    listed, problem = list_devices() if name is None else ([name], None)
    found = [await inspect_device(each) for each in listed]
    if as_json:
        print_json({"devices": found, "rdma_problem": problem})
    else:
        out = console()
        if name is None:
            _print_all(out, found, problem)
        else:
            _print_one(out, found[0])
    return Status.NO if name is not None and found[0].problem is not None else Status.OK


def _table(*columns: str) -> "Table":
    """Return an empty rich table with the given column headings; columns of numbers are right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    return table


_NUMBERS = {"PORT", "MTU", "INDEX"}
_STATES = {"ACTIVE": "green", "DOWN": "red"}


def _print_all(out: "Console", found: "list[DeviceReport]", problem: str | None) -> None:
    """Print a table with a row for each port, then the problems of devices.

    :param problem: reason why RDMA devices cannot be listed; None if they can.
    """
    from rich.text import Text

    table = _table("DEVICE", "PORT", "STATE", "LINK", "MTU", "GID", "NATIVE")
    for device in found:
        for port in device.ports:
            gid = next((each for each in port.gids if each.preferred), None)
            table.add_row(
                Text(device.name, "bold"),
                str(port.number),
                Text(port.state, _STATES.get(port.state, "yellow")),
                port.link_layer,
                str(port.active_mtu),
                Text(f"{gid.address} ({gid.type})" if gid is not None else "none"),
                ", ".join(_native(device)),
            )
    out.print(table)
    for device in found:
        if device.problem is not None:
            out.print(Text.assemble((device.name, "bold"), ": ", (device.problem, "red")))
    if problem is not None:
        out.print(
            Text.assemble(
                ("RDMA devices cannot be listed: ", "yellow"), f"{problem}\nrun `aioverbs doctor` to find the reason"
            )
        )


def _native(device: "DeviceReport") -> list[str]:
    """Return the names of the device's native features, as they are shown in text output."""
    from aioverbs.cli.inventory import FEATURES

    return [FEATURES[feature] for feature, native in device.native.items() if native]


def _print_one(out: "Console", device: "DeviceReport") -> None:
    """Print everything that is known about a device: its ports with their GIDs, its features and its limits."""
    from rich.text import Text

    from aioverbs.cli.inventory import FEATURES

    out.print(Text.assemble((device.name, "bold"), f" ({device.provider})"))
    if device.problem is not None:
        out.print(Text(device.problem, "red"))
    if not device.ports:
        return
    out.print(Text(f"firmware {device.firmware or 'unknown'}, node GUID {device.node_guid}"))
    for port in device.ports:
        line = f", {port.link_layer}, MTU {port.active_mtu}, messages of up to {port.max_message:,} bytes"
        out.print(Text.assemble(f"\nport {port.number}: ", (port.state, _STATES.get(port.state, "yellow")), line))
        gids = _table("INDEX", "GID", "TYPE", "")
        for gid in port.gids:
            gids.add_row(str(gid.index), Text(gid.address), gid.type, "default" if gid.preferred else "")
        out.print(gids)
    out.print()
    features = _table("NATIVE", "")
    for feature, native in device.native.items():
        features.add_row(FEATURES[feature], Text("yes", "green") if native else Text("no", "yellow"))
    out.print(features)
    out.print()
    limits = _table("LIMIT", "")
    limits.columns[1].justify = "right"
    for limit, most in device.limits.items():
        limits.add_row(limit, f"{most:,}" if isinstance(most, int) else most)
    out.print(limits)
