"""`aioverbs doctor`: a diagnosis for people and, as JSON, for programs."""

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

import click

from aioverbs.cli.common import Status, device_names, json_option, print_json
from aioverbs.cli.diagnosis import Diagnosis, Finding, Severity, diagnose
from aioverbs.cli.machine import Device, Library, Machine, look

__all__ = ["as_text", "doctor", "status_of"]

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


@click.command(short_help="Find what is wrong with RDMA devices.")
@click.argument("device", required=False, shell_complete=device_names)
@json_option
@click.pass_context
def doctor(ctx: click.Context, device: str | None, as_json: bool) -> None:
    """Tell which RDMA devices can be used, why others cannot, and which command mends that.

    The exit status is 0 where DEVICE, or without one any RDMA device, can be used; 1 where it is there and cannot be;
    3 where there is none.
    """
    machine = look()
    diagnosis = diagnose(machine)
    status = status_of(diagnosis, device)
    if as_json:
        print_json(_for_programs(machine, diagnosis, status))
    else:
        for line in as_text(machine, diagnosis):
            click.echo(line, color=False if os.environ.get("NO_COLOR") else None)
    ctx.exit(status)


def status_of(diagnosis: Diagnosis, name: str | None = None) -> Status:
    """Whether a device, or where none is named any RDMA device, can be used."""
    if name is not None:
        if name in diagnosis.usable:
            return Status.OK
        return Status.NO if name in diagnosis.unusable else Status.NOT_THERE
    if diagnosis.usable:
        return Status.OK
    return Status.NO if diagnosis.unusable else Status.NOT_THERE


def _for_programs(machine: Machine, diagnosis: Diagnosis, status: Status) -> dict[str, Any]:
    """All that was found, of the machine and of what is wrong with it."""
    described = asdict(machine)
    del described["modules"], described["loadable"]  # hundreds, and nothing of RDMA
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
    """Lines, coloured."""
    yield f"aioverbs {metadata.version('aioverbs')}, Python {platform.python_version()}, Linux {machine.kernel}"
    probe = machine.probe
    if probe.crash is None:
        libraries = (("libibverbs", probe.libibverbs), ("librdmacm", probe.librdmacm), ("pyverbs", probe.pyverbs))
        yield ", ".join(_library(name, library) for name, library in libraries)
    yield f"providers: {', '.join(machine.providers) or 'none'}"
    yield ""
    for device in machine.devices:
        good = device.name in diagnosis.usable
        yield from _device(device, good)
        yield from _findings(diagnosis, device.name)
    if machine.soft_problem is None:
        yield f"{click.style('soft0', bold=True)}  {_verdict(True)}: the software device needs nothing"
    else:
        yield f"{click.style('soft0', bold=True)}  {_verdict(False)}"
        yield from _findings(diagnosis, "soft0")
    yield from _findings(diagnosis, "system", indent="")


def _library(name: str, library: Library) -> str:
    if library.problem is not None:
        return f"no {name}"
    return f"{name} {library.version or f'in {library.path}'}"


def _verdict(good: bool) -> str:
    return click.style("usable", fg="green") if good else click.style("unusable", fg="red")


def _device(device: Device, good: bool) -> Iterator[str]:
    yield f"{click.style(device.name, bold=True)}  {_verdict(good)}"
    for port in device.ports:
        of = f", {port.netdev}" if port.netdev is not None else ""
        yield f"  port {port.number}: {port.state}, {port.link_layer}{of}"
        yield from (f"    GID {gid.index}: {gid.address} {gid.kind}" for gid in port.gids)


def _findings(diagnosis: Diagnosis, subject: str, indent: str = "  ") -> Iterator[str]:
    for finding in diagnosis.findings:
        if finding.subject == subject:
            yield from (f"{indent}{line}" for line in _finding(finding))


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{click.style(finding.severity.value, fg=_COLOURS[finding.severity], bold=True)}: {finding.message}"
    yield from (f"    {command}" for command in finding.commands)
    if finding.hint is not None:
        yield f"  {finding.hint}"
