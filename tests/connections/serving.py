"""Servers on a domain or a pool, and clients of them."""

from typing import Any

from aioverbs import Connection, ResourceDomain, WorkerPool, connect, serve
from aioverbs._connection.connect import Connecting
from aioverbs._server.handler import Handler
from aioverbs._server.server import Server
from tests.connections.ends import HOST, SMALL

__all__ = ["asked", "echo", "served"]


async def echo(connection: Connection) -> None:
    async for message in connection:
        await connection.send(message)


def served(place: ResourceDomain | WorkerPool, handler: Handler = echo, **options: Any) -> Server:
    pool = place if isinstance(place, WorkerPool) else None
    domain = place if isinstance(place, ResourceDomain) else None
    return serve(handler, HOST, domain=domain, pool=pool, settings=SMALL, **options)


def asked(server: Server, domain: ResourceDomain, **options: Any) -> Connecting:
    """Return a pending connection to the server, to await or to enter."""
    return connect(HOST, server.port, domain=domain, settings=SMALL, **options)
