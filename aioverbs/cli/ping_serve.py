"""Server of `aioverbs ping`: sends messages back, or grants memory for reads and writes."""

from collections.abc import Callable

import anyio

from aioverbs._connection.connect import Transport
from aioverbs._connection.connection import Connection
from aioverbs._server.server import Server, serve
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import open_device
from aioverbs.addresses import format_address
from aioverbs.cli.ping_request import PingRequest, pack_accepted, pack_refused
from aioverbs.types import AccessFlags

__all__ = ["EventCallback", "serve_pings"]

EventCallback = Callable[..., None]
"""Function that is called with the name of an event, and with its fields as keyword arguments."""

_REMOTE_ACCESS = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE
_MAX_CONNECTIONS = 64  # bounds the memory, since each connection may need LARGEST bytes


async def serve_pings(
    host: str | None,
    port: int,
    *,
    device: str | None,
    transport: Transport,
    message_model: MessageModel,
    on_event: EventCallback,
) -> None:
    """Serve pings until cancelled.

    :param host: address at which to listen; None for all addresses.
    :param port: port at which to listen; 0 for any free port.
    :param device: name of the device; None for the default device.
    :param transport: how connections are set up.
    :param message_model: how the server waits for completions.
    :param on_event: called with the name of an event, and with its fields as keyword arguments: ``"listening"``
        (device, addresses), ``"peer"`` (peer, verb, size), ``"refused"`` (peer, reason) and ``"disconnected"`` (peer,
        verb, messages, which is the number of messages).
    :raises DeviceNotFoundError: no device has that name.
    :raises OSError: the device is unusable, or listening failed.
    :raises ValueError: `transport` is ``"rdmacm"`` and the device is a software device, or a setting of the software
        device is invalid.
    """
    async with (
        open_device(device) as opened,
        opened.resource_domain(message_model=message_model) as domain,
        _server(domain, host, port, transport, on_event) as server,
    ):
        on_event("listening", device=opened.name, addresses=[format_address(address) for address in server.addresses])
        await anyio.sleep_forever()


def _server(domain: Domain, host: str | None, port: int, transport: Transport, on_event: EventCallback) -> Server:
    """Return an unopened ping server, to be opened and closed with ``async with``.

    A connection that fails ends alone: the other connections continue.
    """

    async def handle(connection: Connection) -> None:
        peer = format_address(connection.remote_address)
        try:
            request = PingRequest.parse(await connection.receive())
        except ValueError as error:
            on_event("refused", peer=peer, reason=str(error))
            await connection.send(pack_refused(str(error)))
            return
        on_event("peer", peer=peer, verb=request.verb, size=request.size)
        messages = 0
        try:
            if request.verb == "send":
                await connection.send(pack_accepted())
                async for message in connection:
                    await connection.send(message)
                    messages += 1
            else:
                await _serve_memory(connection, domain, request)
        finally:
            on_event("disconnected", peer=peer, verb=request.verb, messages=messages)

    return serve(
        handle, host, port, domain=domain, transport=transport, max_connections=_MAX_CONNECTIONS, drain_timeout_s=0
    )


async def _serve_memory(connection: Connection, domain: Domain, request: PingRequest) -> None:
    """Grant memory to the peer, accept the peer's request, and wait until the peer closes the connection.

    :raises VerbsError: the memory cannot be registered, or a memory window cannot be bound.
    :raises BrokenResourceError: the connection broke.
    """
    async with domain.register(request.size, _REMOTE_ACCESS | AccessFlags.LOCAL_WRITE) as region:
        region.buffer[:] = bytes(request.size)
        await connection.grant(region, _REMOTE_ACCESS)
        await connection.send(pack_accepted())
        async for _ in connection:
            pass
        connection.abort()
        await connection.aclose()  # before the memory is deregistered
