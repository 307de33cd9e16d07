"""Establishing a connection: `connect` and the handshake over TCP or rdma_cm."""

import asyncio
import errno
import ssl as tls
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Literal, Required, TypedDict

from aioverbs._connection.cm_control import CM_UNAVAILABLE_ERRORS, resolve
from aioverbs._connection.connection import Connection
from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.establishment import Progress, establish
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.tcp_control import connect_tcp
from aioverbs._durations import duration
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import OwnedBlock
from aioverbs._verbs.base_domain import Domain, check_caller
from aioverbs._verbs.ports import check_port, gid_index
from aioverbs.addresses import check_socket_port
from aioverbs.errors import (
    UnreachableError,
)

__all__ = [
    "ConnectOptions",
    "Connecting",
    "Transport",
    "accept_connection",
    "check_secret",
    "check_transport",
    "connect",
    "uses_rdma_cm",
]

_DEFAULT_SETTINGS = ConnectionSettings()
_CM_RESOLVE_TIMEOUT_S = 2.0  # limit of address resolution in "auto" mode: a peer without rdma_cm may still accept TCP

Transport = Literal["tcp", "rdmacm", "auto"]


class ConnectOptions(TypedDict, total=False):
    """Keyword arguments of `connect`, for functions that pass them on."""

    domain: Required[Domain]
    transport: Transport
    ssl: tls.SSLContext | None
    server_hostname: str | None
    secret: bytes | None
    settings: ConnectionSettings | None
    timeout_s: float


async def accept_connection(
    control: ControlChannel, domain: Domain, secret: bytes | None, settings: ConnectionSettings
) -> Connection:
    """Make a connection to a peer that requested one: perform the listener's part of the handshake.

    There is no time limit: the caller sets one.

    :param control: open channel to the peer. It is closed together with the connection, or here on failure.
    :param domain: domain that the queue pair is created on.
    :param secret: the shared secret; None for no secret.
    :param settings: sizes and times of the connection.
    :returns: the open connection, to be closed by the caller.
    :raises HandshakeError: one end refuses the other.
    :raises BrokenResourceError: the peer is gone.
    :raises ConnectionRejectedError: with rdma_cm: the peer gave up.
    :raises UnreachableError: with rdma_cm: the peer no longer answers.
    :raises VerbsError: the device has no queue pair, completion queue or memory region left, or another verb failed.
    :raises OSError: the process cannot map the memory for the buffers, or has no file descriptor left.
    :raises MemoryError: no memory is left for the buffers.
    :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or the
        domain cannot use ``spin_ns``.
    :raises ClosedResourceError: the domain is not open, or was closed during the handshake.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    return await establish(control, domain, secret, settings, initiator=False)


class Connecting(OwnedBlock[Connection]):
    """Object that `connect` returns, from which a connection is made.

    Awaiting it makes an open `Connection`, which the caller closes. ``async with`` makes one and closes it at the end
    of the block.

    Each await makes a new connection. Only one block may be entered at a time: entering a second one raises
    `RuntimeError`, or `AffinityError` on another event loop.

    :param name: description for error messages.
    :param make: coroutine function that makes an open connection.
    :param may_begin: raises `AffinityError` if the running loop may not connect.
    """

    def __init__(
        self, name: str, make: Callable[[], Coroutine[Any, Any, Connection]], may_begin: Callable[[], object]
    ) -> None:
        super().__init__(name, may_begin)
        self._make = make
        self._connection: Connection | None = None

    def __await__(self) -> Generator[Any, Any, Connection]:
        return self._make().__await__()

    async def _begin(self) -> Connection:
        """Make the connection for the block and return it, open.

        :raises Exception: whatever `connect` raises when awaited.
        """
        self._connection = await self._make()
        return self._connection

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connection at the end of the block: `Connection.aclose`.

        :raises Exception: whatever `Connection.aclose` raises. If the block itself raised, a failure to close is only
            added to the exception of the block, as a note.
        """
        connection, self._connection = self._connection, None
        assert connection is not None
        await connection.__aexit__(kind, error, traceback)


def connect(
    host: str,
    port: int,
    *,
    domain: Domain,
    transport: Transport = "auto",
    ssl: tls.SSLContext | None = None,
    server_hostname: str | None = None,
    secret: bytes | None = None,
    settings: ConnectionSettings | None = None,
    timeout_s: float = 10.0,
) -> Connecting:
    """Connect to a peer: ``async with connect(…) as connection``, or ``connection = await connect(…)``.

    The connection belongs to the event loop that awaits or enters the result. The call itself raises only the
    `ValueError` for an invalid argument; all other exceptions are raised when the result is awaited or entered. An
    attempt that is cancelled or fails leaves nothing open.

    :param host: address or name at which the peer listens.
    :param port: port at which the peer listens, 1..65535.
    :param domain: domain that the queue pair is created on.
    :param transport: how to reach the peer: ``"tcp"``; ``"rdmacm"``, on RDMA devices only; or ``"auto"``: rdma_cm is
        tried first if the device supports it and `ssl` is None, and TCP if rdma_cm does not reach the peer within half
        of `timeout_s`.
    :param ssl: TLS context for the TCP connection, which carries only the handshake; None for no TLS. Messages always
        go from device to device, unencrypted.
    :param server_hostname: name in the peer's certificate; None for `host`.
    :param secret: shared secret, at least 1 byte; None for no secret. Each end proves to the other that it knows the
        secret, without sending it.
    :param settings: sizes and times; None for ``ConnectionSettings()``.
    :param timeout_s: limit of the whole attempt in seconds.
    :returns: an object to await, or to enter with ``async with``; both give an open `Connection`.
    :raises AffinityError: another event loop owns the domain; nothing was done.
    :raises HandshakeError: one end refuses the other because of the protocol version, the secret or the device, or the
        peer refuses because it is busy or closing.
    :raises OSError: the name has no address, nothing listens at the address, (as `ssl.SSLError`) the TLS handshake
        failed, the process cannot map the memory for the buffers, or it has no file descriptor left.
    :raises TimeoutError: the attempt took longer than `timeout_s`; the message names the step that did not succeed.
    :raises BrokenResourceError: the peer went away during the handshake.
    :raises ConnectionRejectedError: with ``"rdmacm"``: the peer rejected the connection or has no listener.
    :raises UnreachableError: with ``"rdmacm"``: there is no route to the peer, or the peer does not answer.
    :raises LibraryNotFoundError: with ``"rdmacm"``: librdmacm is not installed.
    :raises VerbsError: the device has no queue pair, completion queue or memory region left, or another verb failed.
    :raises MemoryError: no memory is left for the buffers.
    :raises ClosedResourceError: the domain is not open.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    :raises RuntimeError: no asyncio event loop is running; or, when entered, the result is already in a block.
    :raises ValueError: `port`, `secret`, `transport` or the combination of `transport` and `ssl` is not valid. When
        awaited or entered: the device does not have the port or GID of the settings or does not support their queue
        depths, the device is a software device and `transport` is ``"rdmacm"``, or the domain cannot use ``spin_ns``.
    """
    chosen = settings if settings is not None else _DEFAULT_SETTINGS
    check_socket_port(port, lowest=1)
    check_secret(secret)
    check_transport(transport, ssl)
    is_cm_only = transport == "rdmacm"

    async def make() -> Connection:
        check_caller(domain, "connect")  # before the peer is contacted
        limit = asyncio.timeout(timeout_s)
        progress = Progress()
        cm_failure = ""
        try:
            async with limit:
                if uses_rdma_cm(transport, domain, ssl):
                    try:
                        cm_timeout_s = None if is_cm_only else timeout_s / 2
                        return await _connect_by_rdma_cm(host, port, domain, secret, chosen, cm_timeout_s, progress)
                    except (*CM_UNAVAILABLE_ERRORS, TimeoutError) as error:
                        if is_cm_only:
                            raise
                        cm_failure = f"; rdma_cm failed first: {str(error) or progress.waiting_for}"
                progress.waiting_for = "the peer's host did not answer over TCP"
                control = await connect_tcp(host, port, ssl, server_hostname)
                progress.waiting_for = "the peer did not continue the handshake over TCP"
                return await establish(control, domain, secret, chosen, progress, initiator=True)
        except TimeoutError:
            if not limit.expired():
                raise
            cause = progress.waiting_for + cm_failure
            raise TimeoutError(
                f"no connection with {host}, port {port}, within {duration(timeout_s)}: {cause}"
            ) from None

    return Connecting(f"connect() to {host}, port {port}", make, lambda: check_caller(domain, "connect"))


async def _connect_by_rdma_cm(
    host: str,
    port: int,
    domain: Domain,
    secret: bytes | None,
    settings: ConnectionSettings,
    timeout_s: float | None,
    progress: Progress,
) -> Connection:
    """Connect to a peer with rdma_cm, and perform the initiator's part of the handshake.

    :param timeout_s: limit of the attempt in seconds, if TCP is tried afterwards; None if the caller alone limits the
        time. With a limit, resolving the peer's address may take at most 2 seconds of it.
    :param progress: receives the description of the current step, for the message of a timeout.
    :returns: the open connection, to be closed by the caller.
    :raises TimeoutError: the attempt did not end within one of these limits.
    :raises LibraryNotFoundError: librdmacm is not installed.
    :raises UnreachableError: the port has no GID, there is no route to the peer, or the peer does not answer.
    :raises ConnectionRejectedError: the peer rejected the connection or has no listener.
    :raises OSError: the name has no address.
    :raises ValueError: the device does not have the port or GID index of `settings`.
    :raises VerbsError: the port cannot be queried, or another verb failed.
    :raises HandshakeError: one end refuses the other.
    :raises Exception: any other exception that `establish` raises.
    """
    context = domain.handle.context
    check_port(context, settings.port, settings.gid_index)
    try:
        index = settings.gid_index if settings.gid_index is not None else gid_index(context, settings.port)
    except ValueError as error:  # a port loses its GID with its address, and may get both back
        raise UnreachableError("rdma_resolve_addr", errno.EADDRNOTAVAIL, str(error)) from error
    async with asyncio.timeout(timeout_s):
        progress.waiting_for = "rdma_cm did not resolve the peer's address"
        # `resolve` repeats its request until this limit
        async with asyncio.timeout(None if timeout_s is None else _CM_RESOLVE_TIMEOUT_S):
            control = await resolve(host, port, context, context.query_gid(settings.port, index))
        progress.waiting_for = "the peer did not answer over rdma_cm, or did not continue the handshake"
        return await establish(control, domain, secret, settings, progress, initiator=True)


def check_secret(secret: bytes | None) -> None:
    """Check that a secret has at least 1 byte, or is None.

    :raises ValueError: the secret is empty.
    """
    if secret is not None and not secret:
        raise ValueError("`secret` must have at least 1 byte; pass None for no secret")


def check_transport(transport: Transport, ssl: tls.SSLContext | None) -> None:
    """Check that the name of a transport is valid, and that the transport supports TLS if `ssl` is not None.

    :raises ValueError: the name is none of ``"tcp"``, ``"rdmacm"`` and ``"auto"``, or ``"rdmacm"`` is combined with
        TLS.
    """
    if transport not in ("tcp", "rdmacm", "auto"):
        raise ValueError(f'`transport` must be "tcp", "rdmacm" or "auto", got {transport!r}')
    if transport == "rdmacm" and ssl is not None:
        raise ValueError('rdma_cm does not support TLS: leave out `ssl`, or pass transport="tcp"')


def uses_rdma_cm(transport: Transport, domain: Domain, ssl: tls.SSLContext | None) -> bool:
    """Return whether to use rdma_cm for connections on a domain.

    The result is True if `transport` is ``"rdmacm"``, or if it is ``"auto"``, `ssl` is None and the domain is on an
    RDMA device.

    :raises ValueError: the transport is ``"rdmacm"`` and the device is a software device.
    :raises ClosedResourceError: the domain is not open.
    """
    context = domain.handle.context
    if transport == "rdmacm" and context.software:
        raise ValueError(f'{context.name} is a software device, which rdma_cm does not support: pass transport="tcp"')
    return transport == "rdmacm" or (transport == "auto" and ssl is None and not context.software)


publish(__name__)
