"""What servers on pools do with connections: worker processes import it."""

import functools
import os
import ssl
import time
from pathlib import Path

from aioverbs import Connection, current_worker
from tests.pool import work


def worker_and_process() -> str:
    """The worker that this is called by, and its process."""
    return f"{current_worker().number} {os.getpid()}"


async def echo(connection: Connection) -> None:
    """Says first where it is."""
    domain = current_worker().domain
    assert domain.owner is not None
    assert domain.owner.owns()
    assert connection._lifecycle.owner == domain.owner
    await connection.send(worker_and_process().encode())
    async for message in connection:
        await connection.send(message)


async def obey(connection: Connection) -> None:
    """Does what it is told."""
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
    """Until it is told to go on, and not for ever."""
    work.mark(folder, "blocking")
    for _ in range(6000):
        if Path(folder, "go on").exists():
            return
        time.sleep(0.005)
    raise TimeoutError


def descriptors() -> int:
    """How many this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def server_context(folder: Path) -> ssl.SSLContext:
    """Of a server with the certificate that `contexts` made there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context


def server_context_factory(folder: Path) -> functools.partial[ssl.SSLContext]:
    """What makes that."""
    return functools.partial(server_context, folder)
