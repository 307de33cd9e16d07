"""`aioverbs doctor`: print a diagnosis of the machine's RDMA devices, as text or JSON."""

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

import click

from aioverbs.cli.common import Status, device_names, json_option, print_json
from aioverbs.cli.diagnosis import Diagnosis, Finding, Severity, diagnose
from aioverbs.cli.machine import Device, Library, Machine, Ways, inspect_machine

__all__ = ["as_text", "doctor", "status_of"]

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


@click.command(short_help="Diagnose problems with RDMA devices.")
@click.argument("device", required=False, shell_complete=device_names)
@json_option
@click.pass_context
def doctor(ctx: click.Context, device: str | None, as_json: bool) -> None:
    """Show which RDMA devices are usable, why the others are not, and which commands fix the problems.

    The exit status is 0 if DEVICE is usable, 1 if it is unusable, and 3 if it does not exist. Without DEVICE, the
    status is 0 if at least one RDMA device is usable, 1 if none is, and 3 if there is no RDMA device. It is 4 if the
    machine cannot be examined.
    """
    machine = inspect_machine()
    diagnosis = diagnose(machine)
    status = status_of(diagnosis, device)
    if as_json:
        print_json(_to_json(machine, diagnosis, status))
    else:
        for line in as_text(machine, diagnosis):
            click.echo(line, color=False if os.environ.get("NO_COLOR") else None)
    ctx.exit(status)


def status_of(diagnosis: Diagnosis, name: str | None = None) -> Status:
    """Return the exit status for one RDMA device, or for RDMA devices in general.

    :param diagnosis: the diagnosis of the machine.
    :param name: name of the device; None for RDMA devices in general.
    :returns: OK if the device is usable, NO if it is unusable, NOT_FOUND if it does not exist. If `name` is None: OK if
        at least one RDMA device is usable, NO if all are unusable, NOT_FOUND if there is none.
    """
    if name is not None:
        if name in diagnosis.usable:
            return Status.OK
        return Status.NO if name in diagnosis.unusable else Status.NOT_FOUND
    if diagnosis.usable:
        return Status.OK
    return Status.NO if diagnosis.unusable else Status.NOT_FOUND


def _to_json(machine: Machine, diagnosis: Diagnosis, status: Status) -> dict[str, Any]:
    """Return a dict with the diagnosis and the machine's data, for `print_json`.

    :param status: exit status of the command, which is part of the output.
    """
    described = asdict(machine)
    del described["modules"], described["loadable"]  # hundreds, most unrelated to RDMA
    return {
        "aioverbs": metadata.version("aioverbs"),
        "python": platform.python_version(),
        "status": int(status),
        "usable": diagnosis.usable,
        "unusable": diagnosis.unusable,
        "findings": [{**asdict(finding), "severity": finding.severity.value} for finding in diagnosis.findings],
        "machine": described,
    }


def as_text(machine: Machine, diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of the report, each a str with ANSI colour codes and without a line break.

    :param machine: data about the machine.
    :param diagnosis: the diagnosis of that machine.
    """
    yield f"aioverbs {metadata.version('aioverbs')}, Python {platform.python_version()}, Linux {machine.kernel}"
    probe = machine.probe
    if probe.crash is None:
        libraries = (("libibverbs", probe.libibverbs), ("librdmacm", probe.librdmacm))
        yield ", ".join(_library(name, library) for name, library in libraries)
    yield f"providers: {', '.join(machine.providers) or 'none'}"
    yield ""
    for device in machine.devices:
        usable = device.name in diagnosis.usable
        yield from _device(device, usable)
        yield from _findings(diagnosis, device.name)
    if machine.soft_problem is None:
        yield f"{click.style('soft0', bold=True)}  {_verdict(True)}: the software device, without requirements"
        if probe.ways is not None:
            yield f"  to other processes: {_ways(probe.ways)}"
    else:
        yield f"{click.style('soft0', bold=True)}  {_verdict(False)}"
        yield from _findings(diagnosis, "soft0")
    yield from _findings(diagnosis, "system", indent="")


def _library(name: str, library: Library) -> str:
    """Return the name and version of a library, such as ``libibverbs 50.0``. If the version is unknown, return the name
    and path; if the library cannot be loaded, return ``no NAME``.
    """
    if library.problem is not None and not library.outdated:
        return f"no {name}"
    return f"{name} {library.version or f'in {library.path}'}"


def _verdict(usable: bool) -> str:
    """Return the word ``usable`` or ``unusable`` with ANSI colour codes."""
    return click.style("usable", fg="green") if usable else click.style("unusable", fg="red")


def _device(device: Device, usable: bool) -> Iterator[str]:
    """Yield the report's lines about an RDMA device, its ports and their GIDs, each as a string.

    :param usable: whether the diagnosis says that the device is usable.
    """
    yield f"{click.style(device.name, bold=True)}  {_verdict(usable)}"
    for port in device.ports:
        suffix = f", {port.netdev}" if port.netdev is not None else ""
        yield f"  port {port.number}: {port.state}, {port.link_layer}{suffix}"
        yield from (f"    GID {gid.index}: {gid.address} {gid.kind}" for gid in port.gids)


def _ways(ways: Ways) -> str:
    """Return how requests and data get to other processes of this user, and why not in a faster way."""
    if ways.problem is not None:
        return f"unknown, for a trial failed: {ways.problem}"
    requests = "requests through shared memory" if ways.rings else f"requests through sockets ({ways.why_not_rings})"
    data = "data by one copy" if ways.direct else f"data with the requests ({ways.why_not_direct})"
    return f"{requests}, {data}"


def _findings(diagnosis: Diagnosis, subject: str, indent: str = "  ") -> Iterator[str]:
    """Yield the report's lines about those findings whose subject is ``subject``, each as a string.

    :param subject: a device name, ``"soft0"`` or ``"system"``.
    :param indent: text before each line.
    """
    for finding in diagnosis.findings:
        if finding.subject == subject:
            yield from (f"{indent}{line}" for line in _finding(finding))


def _finding(finding: Finding) -> Iterator[str]:
    """Yield the report's lines about a finding, each as a string: its severity and message, its commands, and its hint
    if it has one.
    """
    yield f"{click.style(finding.severity.value, fg=_COLOURS[finding.severity], bold=True)}: {finding.message}"
    yield from (f"    {command}" for command in finding.commands)
    if finding.hint is not None:
        yield f"  {finding.hint}"
