"""`aioverbs ping`: how long messages, reads and writes take between two hosts."""

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
SMALLEST, LARGEST = 8, 64 << 20  # as `ping_request` has them
MODELS = ("default", "low-latency", "force-low-latency", "high-bandwidth")
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_PEER = re.compile(r"(\[(?P<address>[^]]+)]|(?P<host>[^][:]+))(:(?P<port>.*))?")
_BAR = 40  # characters


class _Ping(click.Group):
    """`ping HOST` where no other of its commands is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["to", *args]
        return super().parse_args(ctx, args)


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """The options of both ends."""
    options = (
        click.option(
            "--device", metavar="NAME", shell_complete=device_names, help="The device; else the first that is active."
        ),
        click.option(
            "--transport",
            type=click.Choice(["auto", "tcp", "rdmacm"]),
            default="auto",
            show_default=True,
            help="By what the two ends find each other.",
        ),
        click.option(
            "--message-model",
            type=click.Choice(MODELS),
            default="default",
            show_default=True,
            help="How this end waits for what completes.",
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=_Ping, short_help="Measure latency between two hosts.")
def ping() -> None:
    """Measure how long messages, reads and writes take: a server here, a client there.

    \b
      aioverbs ping serve [HOST]      answers
      aioverbs ping HOST[:PORT]       asks; `aioverbs ping to --help` has its options

    Ctrl-C ends it, with a summary. The exit status is 0 where all was answered, 1 where answers were lost, 3 where
    there is no connection.
    """


@ping.command()
@click.argument("host", required=False)
@click.option("--port", type=click.IntRange(0, 0xFFFF), default=PORT, show_default=True, help="0: one that is free.")
@_common
def serve(host: str | None, port: int, device: str | None, transport: str, message_model: str, as_json: bool) -> None:
    """Answer pings at an address of this host's, or at all of them."""
    run(_serve(host, port, device, transport, message_model, as_json))


@ping.command(short_help="Ask a server; `to` may be left out.")
@click.argument("peer", metavar="HOST[:PORT]")
@click.option("-c", "--count", type=click.IntRange(1), help="How many; without it until Ctrl-C.")
@click.option(
    "-s", "--size", type=click.IntRange(SMALLEST, LARGEST), default=64, show_default=True, help="Bytes of each."
)
@click.option("-i", "--interval", type=Seconds(0), default=1.0, show_default=True, help="Seconds from one to the next.")
@click.option(
    "-f", "--flood", is_flag=True, help="The next as soon as the last is answered; only the summary is shown."
)
@click.option(
    "-v",
    "--verb",
    type=click.Choice(["send", "read", "write"]),
    default="send",
    show_default=True,
    help="Messages there and back, or reading or writing memory there.",
)
@click.option(
    "-t",
    "--timeout",
    type=Seconds(0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds after which an answer is lost.",
)
@click.option("-q", "--quiet", is_flag=True, help="Only the summary.")
@_common
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
    """Ask a server, and show how long each answer takes, at the end all of them.

    An IPv6 address with a port stands in brackets: [fd00::1]:7471. With --json each answer is a line, and so is the
    summary, the last one.
    """
    show = _AsJson() if as_json else _AsText()
    show.quiet = quiet or flood
    where = _address(peer)
    run(_to(where, count, 0.0 if flood else interval, timeout, device, transport, message_model, verb, size, show))


def _address(text: str) -> tuple[str, int]:
    if text.count(":") > 1 and not text.startswith("["):
        return text, PORT  # an IPv6 address alone
    found = _PEER.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"a peer is as HOST, HOST:{PORT}, ::1 or [::1]:{PORT}, and not {text!r}")
    host, port = found["address"] or found["host"], found["port"]
    if port is None:
        return host, PORT
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= 0xFFFF:
        raise click.BadParameter(f"a port is from 1 to 65535, and {port!r} is none")
    return host, int(port)


def _model(name: str) -> Any:
    from aioverbs._verbs.completion_queue import MessageModel

    return MessageModel[name.upper().replace("-", "_")]


# ---- The server


async def _serve(
    host: str | None, port: int, device: str | None, transport: Any, message_model: str, as_json: bool
) -> Status:
    from aioverbs.cli.ping_serve import serve_pings

    def tell(event: str, **told: object) -> None:
        if as_json:
            print_json({"event": event, **told}, one_line=True)
        else:
            click.echo(_SAYS[event].format_map({key: _words(value) for key, value in told.items()}))

    with UntilStopped():
        await serve_pings(
            host, port, device=device, transport=transport, message_model=_model(message_model), tell=tell
        )
    return Status.OK


_SAYS = {
    "listening": "serving pings by {device} at {addresses}",
    "peer": "{peer}: {verb} of {size} bytes",
    "refused": "{peer}: refused: {reason}",
    "gone": "{peer}: gone",
}


def _words(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


# ---- The client


async def _to(
    where: tuple[str, int],
    count: int | None,
    interval_s: float,
    timeout_s: float,
    device: str | None,
    transport: Any,
    message_model: str,
    verb: Any,
    size: int,
    show: "_AsJson | _AsText",
) -> Status:
    from aioverbs._verbs.device import open_device
    from aioverbs.cli.ping_client import Pings, Tally, connected
    from aioverbs.cli.ping_request import PingRequest

    tally = Tally()
    begin: float | None = None
    async with AsyncExitStack() as stack:
        with UntilStopped():
            opened = await stack.enter_async_context(open_device(device))
            domain = await stack.enter_async_context(opened.resource_domain(message_model=_model(message_model)))
            once = await connected(stack, domain, *where, transport, PingRequest(verb, size))
            show.start(*where, opened.name, verb, size, message_model)
            begin = time.monotonic()
            await Pings(once, count, interval_s, timeout_s, show.answer).run(tally)
        if begin is None:
            return Status.INTERRUPTED
        show.summary(tally, time.monotonic() - begin)
    return Status.OK if tally.sent and not tally.lost else Status.NO


def _latency(tally: "Tally") -> dict[str, float] | None:
    times = tally.times_ns
    if not times.count:
        return None
    found: dict[str, float] = {"min": times.minimum, "mean": times.mean, "stddev": times.deviation}
    for percent in PERCENTILES:
        found[f"p{percent:g}"] = times.percentile(percent)
    return {**found, "max": times.maximum}


class _AsJson:
    """A line for each event."""

    quiet = False

    def start(self, host: str, port: int, device: str, verb: str, size: int, message_model: str) -> None:
        self._subject = {
            "host": host, "port": port, "device": device, "verb": verb, "size": size, "message_model": message_model,
        }  # fmt: skip

    def answer(self, number: int, nanoseconds: int | None) -> None:
        if not self.quiet:
            print_json({"event": "answer", "seq": number, "time_ns": nanoseconds}, one_line=True)

    def summary(self, tally: "Tally", seconds: float) -> None:
        rows = [{"from_ns": begin, "to_ns": end, "count": count} for begin, end, count in tally.times_ns.rows()]
        counts = {"sent": tally.sent, "received": tally.received, "lost": tally.lost, "broken": tally.broken}
        more = {"duration_s": seconds, "latency_ns": _latency(tally), "histogram": rows}
        print_json({"event": "summary", **self._subject, **counts, **more}, one_line=True)


class _AsText:
    """Lines for people, as ping(8) has them."""

    quiet = False

    def start(self, host: str, port: int, device: str, verb: str, size: int, message_model: str) -> None:
        self._size = size
        self._peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        click.echo(f"PING {self._peer} by {device}: {verb} of {size} bytes, {message_model}")

    def answer(self, number: int, nanoseconds: int | None) -> None:
        if self.quiet:
            return
        if nanoseconds is None:
            click.echo(f"no answer: seq={number}")
        else:
            click.echo(f"{self._size} bytes from {self._peer}: seq={number} time={duration(nanoseconds / 1e9)}")

    def summary(self, tally: "Tally", seconds: float) -> None:
        if sys.stdout.isatty():
            click.echo()  # after ^C
        if tally.broken is not None:
            click.echo(f"aioverbs: the connection is lost: {tally.broken}", err=True)
        click.echo(f"--- {self._peer} ---")
        percent = 100 * tally.lost / tally.sent if tally.sent else 0
        click.echo(f"{tally.sent} sent, {tally.received} answered, {percent:.3g} % lost, in {duration(seconds)}")
        latency = _latency(tally)
        if latency is None:
            return
        click.echo(", ".join(f"{name} {duration(value / 1e9)}" for name, value in latency.items()))
        self._picture(tally)

    def _picture(self, tally: "Tally") -> None:
        from rich.text import Text

        rows = tally.times_ns.rows()
        most = max(count for _, _, count in rows)
        out = console()
        for begin, _, count in rows:
            bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
            out.print(Text.assemble(f"{duration(begin / 1e9):>8} ", (f"{bar:{_BAR}}", "cyan"), f" {count:,}"))
