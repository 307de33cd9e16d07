"""`aioverbs ping`: measure the latency of messages, reads and writes between two hosts."""

import re
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from aioverbs._durations import duration
from aioverbs.cli.common import Seconds, Status, UntilStopped, console, device_names, json_option, print_json, run

if TYPE_CHECKING:
    from aioverbs.cli.ping_client import Tally

__all__ = ["ping"]

PORT = 7471
SMALLEST, LARGEST = 8, 64 << 20  # same values as in `ping_request`, which imports too much for this module
MODELS = ("default", "low-latency", "force-low-latency", "high-bandwidth")
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_PEER_PATTERN = re.compile(r"(\[(?P<address>[^]]+)]|(?P<host>[^][:]+))(:(?P<port>.*))?")
_BAR_COLUMNS = 40  # characters


class _Ping(click.Group):
    """Group whose default command is `to`: `ping HOST` is `ping to HOST`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["to", *args]
        return super().parse_args(ctx, args)


def _shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that client and server have in common to a command; return the command."""
    options = (
        click.option(
            "--device", metavar="NAME", shell_complete=device_names, help="Device. Default: the first active one."
        ),
        click.option(
            "--transport",
            type=click.Choice(["auto", "tcp", "rdmacm"]),
            default="auto",
            show_default=True,
            help="How client and server set up the connection.",
        ),
        click.option(
            "--message-model",
            type=click.Choice(MODELS),
            default="default",
            show_default=True,
            help="How this process waits for completions.",
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=_Ping, short_help="Measure latency between two hosts.")
def ping() -> None:
    """Measure the latency of messages, reads and writes between a client and a server.

    \b
      aioverbs ping serve [HOST]      run the server
      aioverbs ping HOST[:PORT]       run the client; `aioverbs ping to --help` lists its options

    At Ctrl-C, the client prints a summary and ends. The exit status is 0 if all requests were answered, 1 if answers
    were lost, and 3 if the connection could not be established.
    """


@ping.command()
@click.argument("host", required=False)
@click.option("--port", type=click.IntRange(0, 0xFFFF), default=PORT, show_default=True, help="0: any free port.")
@_shared_options
def serve(host: str | None, port: int, device: str | None, transport: str, message_model: str, as_json: bool) -> None:
    """Answer pings at HOST, an address of this host; without HOST, at all of its addresses."""
    run(_serve(host, port, device, transport, message_model, as_json))


@ping.command(short_help="Ping a server; `to` may be omitted.")
@click.argument("peer", metavar="HOST[:PORT]")
@click.option("-c", "--count", type=click.IntRange(1), help="Number of requests. Default: until Ctrl-C.")
@click.option(
    "-s", "--size", type=click.IntRange(SMALLEST, LARGEST), default=64, show_default=True, help="Bytes of a request."
)
@click.option("-i", "--interval", type=Seconds(0), default=1.0, show_default=True, help="Seconds between requests.")
@click.option(
    "-f", "--flood", is_flag=True, help="Send the next request as soon as the answer arrives; show only the summary."
)
@click.option(
    "-v",
    "--verb",
    type=click.Choice(["send", "read", "write"]),
    default="send",
    show_default=True,
    help="Send messages that the server sends back, or read or write the server's memory.",
)
@click.option(
    "-t",
    "--timeout",
    type=Seconds(0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds after which an answer counts as lost.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show only the summary.")
@_shared_options
def to(
    peer: str,
    count: int | None,
    size: int,
    interval: float,
    flood: bool,
    verb: str,
    timeout: float,
    quiet: bool,
    device: str | None,
    transport: str,
    message_model: str,
    as_json: bool,
) -> None:
    """Ping a server: print the latency of each request, and a summary at the end.

    An IPv6 address with a port needs brackets: [fd00::1]:7471. With --json, print one JSON object per line: one for
    each answer, and the summary last.
    """
    output = _JsonOutput() if as_json else _TextOutput()
    output.quiet = quiet or flood
    address = _parse_address(peer)
    interval_s = 0.0 if flood else interval
    run(_ping_peer(address, count, interval_s, timeout, device, transport, message_model, verb, size, output))


def _parse_address(text: str) -> tuple[str, int]:
    """Parse the address of a server. If it contains no port, the port is `PORT`.

    :returns: host and port.
    :raises click.BadParameter: the text is not an address, or its port is invalid.
    """
    if text.count(":") > 1 and not text.startswith("["):
        return text, PORT  # an IPv6 address without a port
    found = _PEER_PATTERN.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"expected an address like HOST, HOST:{PORT}, ::1 or [::1]:{PORT}, got {text!r}")
    host, port = found["address"] or found["host"], found["port"]
    if port is None:
        return host, PORT
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= 0xFFFF:
        raise click.BadParameter(f"expected a port from 1 to 65535, got {port!r}")
    return host, int(port)


def _model(name: str) -> Any:
    """Return the `MessageModel` for a value of the option ``--message-model``."""
    from aioverbs._verbs.completion_queue import MessageModel

    return MessageModel[name.upper().replace("-", "_")]


# ---- The server


async def _serve(
    host: str | None, port: int, device: str | None, transport: Any, message_model: str, as_json: bool
) -> Status:
    """Serve pings and print events until SIGINT or SIGTERM arrives.

    :returns: the exit status, which is OK.
    :raises OSError: the device is unusable, or listening failed.
    :raises DeviceNotFoundError: no device is called ``device``.
    :raises ValueError: ``transport`` is ``"rdmacm"`` and the device is a software device, or a setting of the software
        device is invalid.
    """
    from aioverbs.cli.ping_serve import serve_pings

    def on_event(event: str, **fields: object) -> None:
        if as_json:
            print_json({"event": event, **fields}, one_line=True)
        else:
            click.echo(_EVENT_TEXTS[event].format_map({key: _format_value(value) for key, value in fields.items()}))

    with UntilStopped():
        await serve_pings(
            host, port, device=device, transport=transport, message_model=_model(message_model), on_event=on_event
        )
    return Status.OK


_EVENT_TEXTS = {
    "listening": "serving pings on device {device} at {addresses}",
    "peer": "{peer}: {verb} of {size} bytes",
    "refused": "{peer}: refused: {reason}",
    "disconnected": "{peer}: disconnected",
}


def _format_value(value: object) -> object:
    """Return the items of a list as one text, separated by commas; return any other value unchanged."""
    return ", ".join(map(str, value)) if isinstance(value, list) else value


# ---- The client


async def _ping_peer(
    address: tuple[str, int],
    count: int | None,
    interval_s: float,
    timeout_s: float,
    device: str | None,
    transport: Any,
    message_model: str,
    verb: Any,
    size: int,
    output: "_JsonOutput | _TextOutput",
) -> Status:
    """Connect and ping until all requests are made, the connection breaks, or SIGINT or SIGTERM arrives; then print a
    summary.

    :param address: host and port of the server.
    :param count: number of requests; None if there is no limit.
    :param interval_s: seconds between the starts of two requests.
    :param timeout_s: seconds after which an answer counts as lost.
    :param device: name of the device; None for the default device.
    :param transport: how the connection is set up: ``"auto"``, ``"tcp"`` or ``"rdmacm"``.
    :param size: bytes of each request.
    :returns: the exit status: OK if all requests were answered, NO if an answer was lost or no request was made,
        INTERRUPTED if a signal arrived before the connection was established.
    :raises ConnectionError: the server cannot be reached, or refuses the request.
    :raises OSError: the device is unusable.
    :raises DeviceNotFoundError: no device is called ``device``.
    :raises ValueError: ``transport`` is ``"rdmacm"`` and the device is a software device, or a setting of the software
        device is invalid.
    """
    from aioverbs._verbs.device import open_device
    from aioverbs.cli.ping_client import Pings, Tally, connect_pings
    from aioverbs.cli.ping_request import PingRequest

    tally = Tally()
    begin: float | None = None
    async with AsyncExitStack() as stack:
        with UntilStopped():
            opened = await stack.enter_async_context(open_device(device))
            domain = await stack.enter_async_context(opened.resource_domain(message_model=_model(message_model)))
            ping_once = await connect_pings(stack, domain, *address, transport, PingRequest(verb, size))
            output.start(*address, opened.name, verb, size, message_model)
            begin = time.monotonic()
            await Pings(ping_once, count, interval_s, timeout_s, output.show_answer).run(tally)
        if begin is None:
            return Status.INTERRUPTED
        output.show_summary(tally, time.monotonic() - begin)
    return Status.OK if tally.sent and not tally.lost else Status.NO


def _latency(tally: "Tally") -> dict[str, float] | None:
    """Return a dict with the minimum, mean, standard deviation, percentiles and maximum of the latencies, in
    nanoseconds; None if no request was answered.
    """
    times = tally.times_ns
    if not times.count:
        return None
    found: dict[str, float] = {"min": times.minimum, "mean": times.mean, "stddev": times.deviation}
    for percent in PERCENTILES:
        found[f"p{percent:g}"] = times.percentile(percent)
    return {**found, "max": times.maximum}


class _JsonOutput:
    """Prints one JSON object per event."""

    quiet = False

    def start(self, host: str, port: int, device: str, verb: str, size: int, message_model: str) -> None:
        """Store the parameters of the connection for the summary; print nothing."""
        self._subject = {
            "host": host, "port": port, "device": device, "verb": verb, "size": size, "message_model": message_model,
        }  # fmt: skip

    def show_answer(self, number: int, nanoseconds: int | None) -> None:
        """Print the latency of request ``number``, or that its answer was lost; print nothing if `quiet` is set.

        :param nanoseconds: the latency; None if the answer was lost.
        """
        if not self.quiet:
            print_json({"event": "answer", "seq": number, "time_ns": nanoseconds}, one_line=True)

    def show_summary(self, tally: "Tally", seconds: float) -> None:
        """Print the results of all requests.

        :param seconds: time from the first request to the end of the last one.
        """
        rows = [{"from_ns": begin, "to_ns": end, "count": count} for begin, end, count in tally.times_ns.rows()]
        counts = {"sent": tally.sent, "received": tally.received, "lost": tally.lost, "broken": tally.broken}
        timing = {"duration_s": seconds, "latency_ns": _latency(tally), "histogram": rows}
        print_json({"event": "summary", **self._subject, **counts, **timing}, one_line=True)


class _TextOutput:
    """Prints text in the format of ping(8)."""

    quiet = False

    def start(self, host: str, port: int, device: str, verb: str, size: int, message_model: str) -> None:
        """Print the heading, which describes the connection and the requests."""
        self._size = size
        self._peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        click.echo(f"PING {self._peer} on device {device}: {verb} of {size} bytes, {message_model}")

    def show_answer(self, number: int, nanoseconds: int | None) -> None:
        """Print the latency of request ``number``, or that its answer was lost; print nothing if `quiet` is set.

        :param nanoseconds: the latency; None if the answer was lost.
        """
        if self.quiet:
            return
        if nanoseconds is None:
            click.echo(f"no answer: seq={number}")
        else:
            click.echo(f"{self._size} bytes from {self._peer}: seq={number} time={duration(nanoseconds / 1e9)}")

    def show_summary(self, tally: "Tally", seconds: float) -> None:
        """Print the results of all requests. If the connection broke, print the error to standard error.

        :param seconds: duration of all requests together.
        """
        if sys.stdout.isatty():
            click.echo()  # the terminal has echoed ^C
        if tally.broken is not None:
            click.echo(f"aioverbs: the connection is lost: {tally.broken}", err=True)
        click.echo(f"--- {self._peer} ---")
        percent = 100 * tally.lost / tally.sent if tally.sent else 0
        click.echo(f"{tally.sent} sent, {tally.received} answered, {percent:.3g} % lost, in {duration(seconds)}")
        latency = _latency(tally)
        if latency is None:
            return
        click.echo(", ".join(f"{name} {duration(value / 1e9)}" for name, value in latency.items()))
        self._print_histogram(tally)

    def _print_histogram(self, tally: "Tally") -> None:
        """Print a bar for each row of the latency histogram. At least one request must have been answered."""
        from rich.text import Text

        rows = tally.times_ns.rows()
        largest = max(count for _, _, count in rows)
        out = console()
        for begin, _, count in rows:
            bar = "█" * round(_BAR_COLUMNS * count / largest) or ("▏" if count else "")
            out.print(Text.assemble(f"{duration(begin / 1e9):>8} ", (f"{bar:{_BAR_COLUMNS}}", "cyan"), f" {count:,}"))
