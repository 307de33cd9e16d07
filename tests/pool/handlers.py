"""Handlers of connections for servers on pools. Worker processes import this module."""

import functools
import os
import ssl
import time
from pathlib import Path

from aioverbs import Connection, current_worker
from tests.pool import work


def worker_and_process() -> str:
    """Return the number of the worker that runs the caller, and its process ID."""
    return f"{current_worker().number} {os.getpid()}"


async def echo(connection: Connection) -> None:
    """Send the worker and process, then return each message."""
    domain = current_worker().domain
    assert domain.owner is not None
    assert domain.owner.owns()
    assert connection._lifecycle.owner == domain.owner
    await connection.send(worker_and_process().encode())
    async for message in connection:
        await connection.send(message)


async def obey(connection: Connection) -> None:
    """Execute the commands that the client sends."""
    async for message in connection:
        match message.decode().split():
            case ["where"]:
                await connection.send(worker_and_process().encode())
            case ["fail"]:
                raise RuntimeError("what went wrong")
            case ["leave"]:
                work.exit_worker()
            case ["die"]:
                work.kill_own_process()
            case ["block", folder]:
                block(folder)
            case ["stay", folder]:
                await work.sleep_until_cancelled(folder)
            case ["finish"]:
                await connection.send(b"goodbye")
                return
            case other:
                raise AssertionError(other)


def block(folder: str) -> None:
    """Block the thread until the mark 'go on' exists, for 30 s at most."""
    work.mark(folder, "blocking")
    for _ in range(6000):
        if Path(folder, "go on").exists():
            return
        time.sleep(0.005)
    raise TimeoutError


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def server_context(folder: Path) -> ssl.SSLContext:
    """Return the context of a server with the certificate that `contexts` created in a folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context


def server_context_factory(folder: Path) -> functools.partial[ssl.SSLContext]:
    """Return a function without arguments that makes such a context, and can be pickled."""
    return functools.partial(server_context, folder)
