"""How two ends become a connection: the handshake, over TCP or rdma_cm, and `connect`."""

import asyncio
import contextlib
import errno
import ssl as tls
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Required, TypedDict

from aioverbs._connection.cm_control import CM_UNAVAILABLE_ERRORS, CmControlChannel, resolve
from aioverbs._connection.connection import Connection, ControlChannel
from aioverbs._connection.handshake import Handshake, encode_reject
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.tcp_control import connect_tcp
from aioverbs._durations import duration
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import OwnedBlock, running_loop
from aioverbs._lifecycle.resource import suppress_warning
from aioverbs._proofs import make_nonce
from aioverbs._verbs.base_domain import Domain, check_caller
from aioverbs._verbs.ports import check_port, gid_index
from aioverbs.errors import (
    BrokenResourceError,
    HandshakeError,
    QueuePairStateError,
    UnreachableError,
    WorkCompletionError,
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

_CM_RESOLVE_TIMEOUT_S = 2.0  # for rdma_cm to find a way to a peer that may be there by TCP only

Transport = Literal["tcp", "rdmacm", "auto"]


class ConnectOptions(TypedDict, total=False):
    """What `connect` takes by name, for those who pass it on."""

    domain: Required[Domain]
    transport: Transport
    ssl: tls.SSLContext | None
    server_hostname: str | None
    secret: bytes | None
    settings: ConnectionSettings | None
    timeout_s: float


_abort_tasks: set[asyncio.Task[None]] = set()  # loops keep weak references only; touched by single operations


@dataclass
class _Progress:
    """How far an attempt to connect has come.

    :param awaits: what is missing, for the text of a timeout.
    """

    waiting_for: str = ""


async def _perform_handshake(
    control: ControlChannel,
    secret: bytes | None,
    connection: Connection,
    progress: _Progress | None = None,
    *,
    initiator: bool,
) -> Connection:
    """Both parts of `Handshake`: what it needs of the line, and the making of the connection, which is aborted where
    it fails: by a task, where that has to wait for a verb, which nobody else waits for."""
    handshake = Handshake(initiator, make_nonce(), secret)
    try:
        if isinstance(control, CmControlChannel):
            await _connect_queue_pairs(control, connection, initiator)
        if initiator:
            await control.send(handshake.hello())
            handshake.receive_hello(await control.receive())
            await control.send(handshake.offer(await connection._prepare()))
            await connection._connect_queue_pair(handshake.receive_offer(await control.receive()), control, 0)
            await control.send(handshake.ready())
        else:
            handshake.receive_hello(await control.receive())
            await control.send(handshake.hello())
            peer = handshake.receive_offer(await control.receive())
            ours = await connection._prepare()
            await connection._connect_queue_pair(peer, control, 1)
            await control.send(handshake.offer(ours))
            handshake.receive_ready(await control.receive())
        connection._finish_handshake(control)
    except BaseException as error:
        if isinstance(error, HandshakeError) and not error.by_peer:
            with contextlib.suppress(OSError, BrokenResourceError, QueuePairStateError, WorkCompletionError):
                await control.send(encode_reject(error))
        try:
            if connection._is_modify_pending:
                if progress is not None:
                    progress.waiting_for = "the device still looks for the peer's neighbour"
                _abort_in_background(connection)
            else:
                await connection.abort()
        finally:
            if isinstance(error, Exception) or isinstance(control, CmControlChannel):
                await control.aclose()
            else:
                control.abort()
        raise
    return connection


def _abort_in_background(connection: Connection) -> None:
    """Have a connection aborted by a task."""
    suppress_warning(connection)  # nobody left it open
    task = running_loop().create_task(connection.abort())
    _abort_tasks.add(task)
    task.add_done_callback(_abort_tasks.discard)


async def _connect_queue_pairs(control: CmControlChannel, connection: Connection, initiator: bool) -> None:
    # rdma_cm connects the queue pairs; what there is to say goes over them, and their receives are posted before.
    await connection._prepare()
    connection._watch_peer(control)
    assert connection._channel is not None
    attributes = connection.settings.repetitions(software=False)
    if initiator:
        await control.connect(connection._channel, **attributes)
    else:
        await control.accept(connection._channel, **attributes)


async def accept_connection(
    control: ControlChannel, domain: Domain, secret: bytes | None, settings: ConnectionSettings
) -> Connection:
    """Be the end that was asked for a connection; the line is its own.

    :raises HandshakeError: one end refuses the other.
    :raises BrokenResourceError: the peer is gone.
    """
    return await _perform_handshake(control, secret, Connection(domain, settings), initiator=False)


class Connecting(OwnedBlock[Connection]):
    """What `connect` returns: awaited it gives a `Connection`, ``async with`` closes that at the end.

    Each await gives another connection; one block at a time has it.
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
        self._connection = await self._make()
        return self._connection

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    """Connect to a peer that listens: ``async with connect(…) as connection``, or ``connection = await connect(…)``.

    :param host: where the peer listens: an address, or a name.
    :param port: where it listens.
    :param domain: what the queue pair is made on; the connection belongs to the running loop.
    :param transport: by what the two ends find each other: ``"tcp"``; ``"rdmacm"``, on RDMA devices; ``"auto"``: by
        rdma_cm where the device has it and the peer is found so within half of `timeout_s`, without TLS; else by TCP.
    :param ssl: for TLS on the TCP connection, which carries the handshake and no data of the user's; the data goes from
        device to device as it is.
    :param server_hostname: the name in the peer's certificate; None: `host`.
    :param secret: what both ends know, and prove to each other without telling it.
    :param settings: sizes and times; None: those of `ConnectionSettings()`.
    :param timeout_s: the longest that all of it may take, in seconds.
    :raises AffinityError: another event loop owns the domain; nothing was done.
    :raises HandshakeError: one end refuses the other.
    :raises OSError: nobody listens there; of these, `ssl.SSLError`: TLS does not come about.
    :raises TimeoutError: it took too long; the text says what was waited for.
    :raises BrokenResourceError: the peer went meanwhile.
    """
    chosen = settings if settings is not None else ConnectionSettings()
    check_secret(secret)
    check_transport(transport, ssl)
    is_cm_only = transport == "rdmacm"

    async def make() -> Connection:
        check_caller(domain, "connect")  # before the peer hears of it
        limit = asyncio.timeout(timeout_s)
        progress = _Progress()
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
                        cm_failure = f", and before that: {str(error) or progress.waiting_for}"
                progress.waiting_for = "the peer's host did not answer by TCP"
                control = await connect_tcp(host, port, ssl, server_hostname)
                progress.waiting_for = "the peer did not go on with the handshake over TCP"
                return await _perform_handshake(control, secret, Connection(domain, chosen), progress, initiator=True)
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
    progress: _Progress,
) -> Connection:
    """Connect by rdma_cm.

    :param timeout_s: the longest that it may take where TCP is tried afterwards; None: where it is not.
    :raises TimeoutError: it took longer.
    """
    context = domain.handle.context
    check_port(context, settings.port, settings.gid_index)
    try:
        index = settings.gid_index if settings.gid_index is not None else gid_index(context, settings.port)
    except ValueError as error:  # a port without a GID, which goes and comes with its address
        raise UnreachableError("rdma_resolve_addr", errno.EADDRNOTAVAIL, str(error)) from error
    async with asyncio.timeout(timeout_s):
        progress.waiting_for = "rdma_cm did not resolve the peer's address"
        async with asyncio.timeout(None if timeout_s is None else _CM_RESOLVE_TIMEOUT_S):  # it is asked again and again
            control = await resolve(host, port, context, context.query_gid(settings.port, index))
        progress.waiting_for = "the peer did not answer by rdma_cm, or go on with the handshake"
        return await _perform_handshake(control, secret, Connection(domain, settings), progress, initiator=True)


def check_secret(secret: bytes | None) -> None:
    """See that it is one, or that none is wanted."""
    if secret is not None and not secret:
        raise ValueError("a secret has one byte at least; None is for no secret")


def check_transport(transport: Transport, ssl: tls.SSLContext | None) -> None:
    """See that there is such a transport, and that it has TLS where that is wanted."""
    if transport not in ("tcp", "rdmacm", "auto"):
        raise ValueError(f'transport is "tcp", "rdmacm" or "auto", not {transport!r}')
    if transport == "rdmacm" and ssl is not None:
        raise ValueError('TLS is for TCP: leave out ssl, or say transport="tcp"')


def uses_rdma_cm(transport: Transport, domain: Domain, ssl: tls.SSLContext | None) -> bool:
    """Whether rdma_cm is to be asked."""
    context = domain.handle.context
    if transport == "rdmacm" and context.software:
        raise ValueError(f'{context.name} is a software device, which rdma_cm does not know: say transport="tcp"')
    return transport == "rdmacm" or (transport == "auto" and ssl is None and not context.software)


publish(__name__)
