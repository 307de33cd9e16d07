"""Listening for comms."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import dask.config
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import BaseListener, CommClosedError
from distributed.comm.utils import ensure_concrete_host

from aioverbs._connection.connection import Connection
from aioverbs._server.listener import ConnectionListener, listen
from aioverbs.addresses import Address
from aioverbs.distributed.comm import PREFIX, AioverbsComm
from aioverbs.distributed.configuration import connection_settings, transport
from aioverbs.distributed.domains import get_domain
from aioverbs.distributed.encryption import check_encryption
from aioverbs.errors import VerbsError

__all__ = ["AioverbsListener"]

logger = logging.getLogger("aioverbs")

_RETRY_S = 1.0


class AioverbsListener(BaseListener):
    """Listener of the scheme ``aioverbs``.

    :param address: host and port without scheme. An empty host stands for all addresses of this machine.
    :param comm_handler: coroutine function that is called with each comm, in a task of its own.
    :param deserialize: False to leave the objects in received messages serialized.
    :param allow_offload: False to deserialize long messages in the thread of the event loop.
    :param default_host: host of the contact address if `address` stands for all addresses; None for the one that other
        hosts most likely reach.
    :param default_port: port if `address` has none; 0 for a free one.
    :param connection_args: arguments that `distributed` made from its `distributed.Security`; others are ignored.
    :raises RuntimeError: the configuration requires encryption.
    :raises ValueError: the address is malformed.
    """

    prefix = PREFIX
    """Scheme of the addresses, which a worker puts before its own ones."""

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[AioverbsComm], Awaitable[object]],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        check_encryption(address, connection_args)
        self._host, self._port = parse_host_port(address, default_port)
        self._comm_handler = comm_handler
        self._deserialize = deserialize
        self._allow_offload = allow_offload
        self._default_host = default_host
        self._listener: ConnectionListener | None = None
        self._address: Address | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # referenced, because an event loop does not keep its tasks

    async def start(self) -> None:
        """Begin to listen.

        :raises OSError: the name has no address, the port is in use, or the address does not belong to this machine.
        :raises Exception: any other exception that `aioverbs.listen` or `shared_device` raises.
        """
        self._listener = listener = await self._listen()
        # IPv4 first: the host name of a machine often has no address of IPv6
        self._address = min(listener.addresses, key=lambda address: ":" in address[0])
        self._port = self._address[1]
        self._start_task(self._accept(listener))

    async def _listen(self) -> ConnectionListener:
        """Listen on the domain of the running loop.

        :raises Exception: whatever `start` raises.
        """
        return await listen(
            self._host or None,
            self._port,
            domain=await get_domain(),
            transport=transport(),
            settings=connection_settings(),
            backlog=int(dask.config.get("distributed.comm.socket-backlog")),
        ).open()

    def _start_task(self, coroutine: Any) -> None:
        """Run a coroutine in a task of its own."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: ConnectionListener) -> None:
        """Handle each connection in a task of its own, until this is stopped."""
        while self._listener is listener:
            async for connection in listener:
                self._begin(connection)
            listener = await self._replace(listener)

    async def _replace(self, listener: ConnectionListener) -> ConnectionListener:
        """Listen again at the same port, on another domain, because a listener has ended with its domain or device. Try
        again until that is possible, and log each reason why it is not once.

        :returns: the new listener; the same one if this was stopped.
        """
        reasons: set[str] = set()
        while self._listener is listener:
            try:
                replacement = await self._listen()
            except Exception as error:
                if (reason := str(error)) not in reasons:
                    reasons.add(reason)
                    logger.warning("cannot listen again at %s: %s", self.listen_address, reason)
                await asyncio.sleep(_RETRY_S)
                continue
            if self._listener is listener:
                self._listener = replacement
            else:  # stopped meanwhile
                replacement.close()
            return replacement
        return listener

    def _begin(self, connection: Connection) -> None:
        """Make a comm of a connection, and handle it in a task, which alone refers to it: if the task is cancelled
        before its first step, the comm is dropped, which closes the connection.
        """
        is_open = connection.broken is None and not connection.closed  # closed: with its domain
        remote = connection.remote_address if is_open else None
        local = connection.local_address if is_open else None
        if remote is None or local is None:  # the peer has gone
            try:
                connection.abort()
            except VerbsError as error:  # its domain tries again
                logger.warning("a connection whose peer has gone could not be closed: %s", error)
            return
        comm = AioverbsComm(
            connection,
            PREFIX + unparse_host_port(*local[:2]),
            PREFIX + unparse_host_port(*remote[:2]),
            self._deserialize,
        )
        comm.allow_offload = self._allow_offload
        self._start_task(self._handle(comm))

    async def _handle(self, comm: AioverbsComm) -> None:
        """Perform the handshake of `distributed`, and call the handler."""
        if self._listener is None:  # stopped
            comm.abort()
            return
        try:
            await self.on_connection(comm)
        except CommClosedError:
            logger.info("the connection from %s was lost before its handshake was completed", comm.peer_address)
            return
        except Exception:
            logger.exception("the handshake with %s failed", comm.peer_address)
            comm.abort()
            return
        try:
            await self._comm_handler(comm)
        except Exception:
            logger.exception("the handler of the comm from %s failed", comm.peer_address)

    def stop(self) -> None:
        """Stop listening. The port is free when this returns; comms stay open. Stopping twice has no effect."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def get_host_port(self) -> tuple[str, int]:
        """Return the host and the port at which this listens.

        :raises ValueError: the listener was not started.
        """
        if self._address is None:
            raise ValueError("the listener has no address yet: start it first")
        return self._address[:2]

    @property
    def listen_address(self) -> str:
        """Address at which this listens, such as ``aioverbs://0.0.0.0:8786``."""
        return PREFIX + unparse_host_port(*self.get_host_port())

    @property
    def contact_address(self) -> str:
        """Address to connect to: `listen_address`, with the address of this machine in place of a wildcard."""
        host, port = self.get_host_port()
        return PREFIX + unparse_host_port(ensure_concrete_host(host, default_host=self._default_host), port)
