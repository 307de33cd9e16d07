"""The server of `aioverbs ping`: it sends back what it is sent, or has memory read and written."""

from collections.abc import Callable

import anyio

from aioverbs._connection.connect import Transport
from aioverbs._connection.connection import Connection
from aioverbs._server.server import Server, serve
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import open_device
from aioverbs.addresses import format_address
from aioverbs.cli.ping_request import PingRequest, accepted, refused
from aioverbs.types import AccessFlags

__all__ = ["Tell", "serve_pings"]

Tell = Callable[..., None]
"""Is called with the name of an event and what there is to tell of it."""

_GRANTED = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
_MOST = 64  # connections at once, each of which may have memory


async def serve_pings(
    host: str | None,
    port: int,
    *,
    device: str | None,
    transport: Transport,
    message_model: MessageModel,
    tell: Tell,
) -> None:
    """Serve until it is cancelled.

    :param tell: of ``listening`` with the device and the addresses; of ``peer`` with its address and what it asks for;
        of ``refused`` with why; of ``gone`` with how many messages there were.
    """
    async with (
        open_device(device) as opened,
        opened.resource_domain(message_model=message_model) as domain,
        _server(domain, host, port, transport, tell) as server,
    ):
        tell("listening", device=opened.name, addresses=[format_address(address) for address in server.addresses])
        await anyio.sleep_forever()


def _server(domain: Domain, host: str | None, port: int, transport: Transport, tell: Tell) -> Server:
    async def handle(connection: Connection) -> None:
        peer = format_address(connection.remote_address)
        try:
            request = PingRequest.parse(await connection.receive())
        except ValueError as error:
            tell("refused", peer=peer, reason=str(error))
            await connection.send(refused(str(error)))
            return
        tell("peer", peer=peer, verb=request.verb, size=request.size)
        count = 0
        try:
            if request.verb == "send":
                await connection.send(accepted())
                async for message in connection:
                    await connection.send(message)
                    count += 1
            else:
                await _lend(connection, domain, request)
        finally:
            tell("gone", peer=peer, verb=request.verb, messages=count)

    return serve(handle, host, port, domain=domain, transport=transport, max_connections=_MOST, drain_timeout_s=0)


async def _lend(connection: Connection, domain: Domain, request: PingRequest) -> None:
    """Until the peer has done with it, which is when it closes the connection."""
    async with domain.register(request.size, _GRANTED | AccessFlags.LOCAL_WRITE) as region:
        region.buffer[:] = bytes(request.size)
        await connection.grant(region, _GRANTED)
        await connection.send(accepted())
        async for _ in connection:
            pass
        await connection.abort()  # before its memory goes
