"""Command line: `serve`, `client`, `load`, `demo` and `access`."""

import asyncio
import contextlib
import functools
import json
import logging
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import anyio
import click
from rich.console import Console

import aioverbs
from storage_server import load as loading, transfer
from storage_server.catalog import Catalog
from storage_server.client import Storage, connect
from storage_server.demo.report import print_report
from storage_server.demo.scenario import Plan, demonstrate
from storage_server.errors import StorageError
from storage_server.protocol import Mode, ProtocolError
from storage_server.server import BackingName, Settings, serving

__all__ = ["main"]

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)


def size(text: str | int) -> int:
    """Parse a size such as 4096, 64K, 10MiB or 1G, with units that are powers of 1024; return the number of bytes.

    :raises click.BadParameter: the text is not a size.
    """
    found = _SIZE.fullmatch(str(text).strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size: use 4096, 64K, 10MiB or 1G")
    return int(found[1]) << _UNITS[found[2].upper()]


@contextlib.contextmanager
def _report_errors() -> Iterator[None]:
    """Turn an expected error in the block into a one-line message.

    :raises click.ClickException: the block raised an expected error; click prints the message and exits with status 1.
    """
    try:
        yield
    except ConnectionRefusedError as error:
        hint = "" if isinstance(error, aioverbs.HandshakeError) else ": is a server running there?"
        raise click.ClickException(f"{error}{hint}") from error
    except (StorageError, ProtocolError, OSError, aioverbs.BrokenResourceError, anyio.EndOfStream) as error:
        text = str(error) or "the server ended the connection"
        raise click.ClickException(text) from error
    except aioverbs.DeviceNotFoundError as error:
        raise click.ClickException(str(error)) from error


@click.group(help="Volumes in files, read and written by RDMA. AIOVERBS_DEVICE names the device.")
@click.option("--verbose", is_flag=True, help="Log more to standard error.")
def main(*, verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


# ---- serve


@main.command(help="Serve the volumes of the folder ROOT, which is created if missing.")
@click.argument("root", type=click.Path(path_type=Path, file_okay=False))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="TCP port; 0: a free one, which is printed.")
@click.option(
    "--workers", default=2, show_default=True, type=click.IntRange(1, 256), help="Threads with an event loop each."
)
@click.option("--loop", default="asyncio", show_default=True, type=click.Choice(["asyncio", "uvloop"]))
@click.option("--backing", default="auto", show_default=True, type=click.Choice(["auto", "mapped", "cached"]))
@click.option("--memory", default="1G", show_default=True, type=size, help="Limit of all caches together.")
@click.option("--spin-us", default=50, show_default=True, type=click.IntRange(0, 10**6), help="Poll before sleeping.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="For Prometheus, on 127.0.0.1; 0: a free port.")
def serve(
    root: Path,
    host: str,
    port: int,
    workers: int,
    loop: Literal["asyncio", "uvloop"],
    backing: BackingName,
    memory: int,
    spin_us: int,
    metrics_port: int | None,
) -> None:
    settings = Settings(workers, loop, backing, memory, spin_us)
    with _report_errors():
        asyncio.run(_serve(root, host, port, settings, metrics_port))


async def _serve(root: Path, host: str, port: int, settings: Settings, metrics_port: int | None) -> None:
    """Serve volumes until SIGINT or SIGTERM arrives; print the address first."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with (
        aioverbs.open_device() as device,
        serving(root, host, port, device=device, settings=settings) as server,
    ):
        with contextlib.ExitStack() as stack:
            if metrics_port is not None:
                chosen, stop = server.metrics.serve(metrics_port)
                stack.callback(stop)
                print(f"metrics at http://127.0.0.1:{chosen}/metrics")
            print(f"serving {root} at {host}:{server.port}", flush=True)
            await ended.wait()


# ---- client


def place(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, as `serve` prints it; return host and port.

    :raises click.BadParameter: the text is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise click.BadParameter(f"{text!r} is not HOST:PORT, as `serve` prints it")
    return host.strip("[]"), int(port)


_at = click.option("--at", required=True, type=place, envvar="STORAGE_AT", show_envvar=True, help="The server.")
_token = click.option(
    "--token-file",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    envvar="STORAGE_TOKEN_FILE",
    show_envvar=True,
    help="ROOT/owner.token, or what `access add` printed.",
)


@main.group(help="Create, use and delete volumes.")
@_at
@_token
@click.pass_context
def client(context: click.Context, at: tuple[str, int], token_file: Path) -> None:
    context.obj = (*at, token_file.read_text())


@contextlib.asynccontextmanager
async def _connected(host: str, port: int, token: str) -> AsyncIterator[Storage]:
    """Open the device and connect to a server for the duration of the block; yield a `Storage`."""
    async with (
        aioverbs.open_device() as device,
        device.resource_domain() as domain,
        connect(host, port, token, domain=domain) as storage,
    ):
        yield storage


def _use(context: click.Context, use: Callable[[Storage], Awaitable[object]]) -> None:
    """Connect to the server named by the group's options, and await `use` with the connection.

    :param use: function that is called with a `Storage` and returns an awaitable.
    :raises click.ClickException: an expected error occurred.
    """

    async def run() -> None:
        async with _connected(*context.obj) as storage:
            await use(storage)

    with _report_errors():
        asyncio.run(run())


@client.command("list", help="Print the volumes that this client may read: name, bytes, and whether it is a snapshot.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def list_volumes(context: click.Context, *, as_json: bool) -> None:
    async def show(storage: Storage) -> None:
        volumes = await storage.volumes()
        if as_json:
            print(json.dumps([each._asdict() for each in volumes]))
        else:
            for name, size, read_only in volumes:
                print(f"{name} {size}{' read-only' if read_only else ''}")

    _use(context, show)


@client.command(help="Create a volume of SIZE zeros.")
@click.argument("name")
@click.argument("size", type=size)
@click.pass_context
def create(context: click.Context, name: str, size: int) -> None:
    _use(context, lambda storage: storage.create(name, size))


@client.command(help="Change the size of a volume.")
@click.argument("name")
@click.argument("size", type=size)
@click.pass_context
def resize(context: click.Context, name: str, size: int) -> None:
    _use(context, lambda storage: storage.resize(name, size))


@client.command(help="Delete a volume.")
@click.argument("name")
@click.pass_context
def delete(context: click.Context, name: str) -> None:
    _use(context, lambda storage: storage.delete(name))


@client.command(help="Create NAME as a read-only copy of SOURCE.")
@click.argument("source")
@click.argument("name")
@click.pass_context
def snapshot(context: click.Context, source: str, name: str) -> None:
    _use(context, lambda storage: storage.snapshot(source, name))


@client.command(help="Create NAME as a writable copy of SOURCE.")
@click.argument("source")
@click.argument("name")
@click.pass_context
def clone(context: click.Context, source: str, name: str) -> None:
    _use(context, lambda storage: storage.clone(source, name))


_verify = click.option("--verify", is_flag=True, help="Compare checksums with the server's.")
_messages = click.option("--by-messages", is_flag=True, help="Use messages instead of one-sided RDMA.")


@client.command(help="Write FILE to the beginning of the volume NAME, and flush it.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("name")
@_verify
@_messages
@click.pass_context
def put(context: click.Context, file: Path, name: str, *, verify: bool, by_messages: bool) -> None:
    length = file.stat().st_size

    async def send(storage: Storage) -> None:
        async with storage.open(name, write=True, by_messages=by_messages) as volume:
            with transfer.bars(Console(stderr=True)) as bars:
                task = bars.add_task(f"put {file.name}", total=length)
                await transfer.put(file, volume, functools.partial(bars.advance, task), verify=verify)
        print(f"wrote {length:,} bytes to {name}", file=sys.stderr)

    _use(context, send)


@client.command(help="Read the volume NAME to FILE.")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_verify
@_messages
@click.pass_context
def get(context: click.Context, name: str, file: Path, *, verify: bool, by_messages: bool) -> None:
    async def fetch(storage: Storage) -> None:
        async with storage.open(name, by_messages=by_messages) as volume:
            with transfer.bars(Console(stderr=True)) as bars:
                task = bars.add_task(f"get {name}", total=volume.size)
                await transfer.get(volume, file, functools.partial(bars.advance, task), verify=verify)
            print(f"read {volume.size:,} bytes of {name}", file=sys.stderr)

    _use(context, fetch)


# ---- load


@main.command(help="Read and write blocks of the volume NAME in several processes, and print the results as JSON.")
@_at
@_token
@click.argument("name")
@click.option("--clients", default=2, show_default=True, type=click.IntRange(1, 64), help="Processes.")
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(0.01, 86400))
@click.option("--block", default="4K", show_default=True, type=size)
@click.option(
    "--window", default=32, show_default=True, type=click.IntRange(1, 1024), help="Operations in flight, each."
)
@click.option("--pattern", default="random", show_default=True, type=click.Choice(["random", "sequential"]))
@click.option("--reads", default=100, show_default=True, type=click.IntRange(0, 100), help="Percentage.")
@click.option("--flush-every", default=0, type=click.IntRange(0), help="Number of writes; 0: at the end only.")
@click.option("--check/--no-check", default=True, help="Check the blocks that are read.")
@click.option("--fill/--no-fill", default=True, help="Write all blocks first.")
@click.option("--spin-us", default=0, show_default=True, type=click.IntRange(0, 10**6), help="Poll before sleeping.")
@click.option("--seed", default=1, show_default=True, type=int)
@_messages
def load(at: tuple[str, int], token_file: Path, name: str, **options: Any) -> None:
    with _report_errors():
        done = asyncio.run(loading.run(loading.Plan(*at, token_file.read_text(), name, **options)))
    print(json.dumps(done, indent=2))
    if done["wrong_blocks"]:
        raise click.ClickException(f"{done['wrong_blocks']} blocks have wrong contents")


# ---- demo


@main.command(help="Start a server and clients of it, write and read files, and compare every byte.")
@click.option("--device", help="Name; default: AIOVERBS_DEVICE, else the best one.")
@click.option("--size", default="200M", show_default=True, type=size, help="Bytes of all files together.")
@click.option("--clients", default=2, show_default=True, type=click.IntRange(1, 16), help="Processes.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 64), help="Worker loops of the server.")
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0.2, 3600),
    help="Duration of reading single blocks.",
)
@click.option("--seed", default=1, show_default=True, type=int, help="Seed of the files' contents.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def demo(*, as_json: bool, **options: Any) -> None:
    console = Console(quiet=as_json, width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        with _report_errors():
            outcome = asyncio.run(demonstrate(Plan(**options), console))
    except asyncio.CancelledError:
        raise click.Abort from None
    if as_json:
        print(json.dumps({"verified": outcome.verified, **asdict(outcome), "tree": str(outcome.tree)}, indent=2))
    else:
        print_report(console, outcome)
    if not outcome.verified:
        sys.exit(1)


# ---- access


@main.group(help="Manage the rights to volumes of the folder ROOT; a running server applies changes within a second.")
@click.argument("root", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.pass_context
def access(context: click.Context, root: Path) -> None:
    path = root / "catalog.sqlite"
    if not path.exists():
        raise click.ClickException(f"{root} is not a server's folder: `serve` creates one")
    with _report_errors():
        context.obj = context.with_resource(contextlib.closing(Catalog(path)))


@access.command(help="Add a client, and print its token, which is not stored.")
@click.argument("name")
@click.option("--admin", is_flag=True, help="Grant all rights.")
@click.pass_obj
def add(catalog: Catalog, name: str, *, admin: bool) -> None:
    with _report_errors():
        print(catalog.add_client(name, admin=admin))


@access.command(help="Remove a client.")
@click.argument("name")
@click.pass_obj
def remove(catalog: Catalog, name: str) -> None:
    with _report_errors():
        catalog.remove_client(name)


@access.command(help="Set the right of the client NAME to VOLUME.")
@click.argument("name")
@click.argument("volume")
@click.argument("mode", type=click.Choice(["none", "read", "write"]))
@click.pass_obj
def allow(catalog: Catalog, name: str, volume: str, mode: str) -> None:
    with _report_errors():
        catalog.allow(name, volume, Mode[mode.upper()])


@access.command("list", help="List the clients and their rights.")
@click.pass_obj
def list_clients(catalog: Catalog) -> None:
    for name, admin, rights in catalog.clients():
        print(
            name, *(["everything"] if admin else [f"{volume}:{mode.name.lower()}" for volume, mode in rights.items()])
        )
