"""Base of listeners and servers: opening and closing of an acceptor, and the check of the owner."""

import threading
from typing import Self

import anyio.abc

from aioverbs._connection.connect import Transport, check_transport
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.resource import Resource, lifecycle_of
from aioverbs._server.accept import AcceptSettings, TlsContext
from aioverbs._server.acceptor import Acceptor, ServerStatistics
from aioverbs._verbs.base_domain import Domain, check_caller
from aioverbs.addresses import Address, check_socket_port, format_address
from aioverbs.errors import ClosedResourceError

__all__ = ["AcceptorResource", "make_accept_settings"]


class AcceptorResource(anyio.abc.AsyncResource):
    """Base of `ConnectionListener` and `Server`. Owns an acceptor, and belongs to the event loop that opens it.

    ``async with`` opens the object, gives the object itself and closes it at the end of the block.

    :param listen_args: arguments of `Acceptor.open`.
    :param acceptor: the acceptor, which is not open yet.
    :param parent: domain or pool that the connections are created on.
    :raises ValueError: the port of `listen_args` is not in 0..65535.
    """

    def __init__(
        self, listen_args: tuple[str | None, int, int, Transport, Domain | None], acceptor: Acceptor, parent: Resource
    ) -> None:
        check_socket_port(listen_args[1])
        self._listen_args = listen_args
        self._domain = listen_args[-1]
        self._acceptor = acceptor
        self._parent = parent  # domain or pool that the connections are created on
        self._owner: Affinity | None = None  # None until opened
        self._thread = 0  # of the loop that opened it
        self._is_closing = False  # `close` was called
        self._closed = False
        acceptor.when_useless(self.close)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {', '.join(map(format_address, self.addresses)) or 'no address'}>"

    async def open(self) -> Self:
        """Start listening for peers and accepting them. If listening fails, this object can be opened again.

        :returns: this object.
        :raises AffinityError: another event loop owns the domain.
        :raises ClosedResourceError: this object is open, or was closed before or during this call, or the domain or
            pool is not open. If this object is open, it stays open.
        :raises OSError: the name has no address, an address is in use or does not belong to this machine, no file
            descriptor is left, or the process cannot map the memory for the buffers of connections.
        :raises MemoryError: no memory is left for the buffers.
        :raises ValueError: the transport is ``"rdmacm"`` and the domain is on a software device; or rdma_cm is used,
            and the backlog is less than 1.
        :raises LibraryNotFoundError: the transport is ``"rdmacm"`` and librdmacm is not installed.
        :raises VerbsError: the device cannot register the memory for the buffers; or the transport is ``"rdmacm"``, and
            rdma_cm does not work on this machine, or the address is in use or belongs to no RDMA device.
        :raises RuntimeError: no asyncio event loop is running.
        """
        if self._owner is not None or self._closed:
            raise ClosedResourceError(f"{self!r} cannot be opened again: make a new one")
        self._check_caller("open")
        self._owner, self._thread = Affinity.of_running_loop(), threading.get_ident()
        try:
            lifecycle_of(self._parent).attach(self._acceptor)
            await self._acceptor.open(*self._listen_args)
        except BaseException:
            self._owner = None
            lifecycle_of(self._parent).detach(self._acceptor)
            raise
        return self

    def _check_caller(self, operation: str) -> None:
        """Check that the owner's event loop is running, because tasks and futures belong to that loop.

        The owner is the loop that opened this object; before that, the loop that owns the domain. Any caller passes if
        there is no owner, or if this object is closed.

        :param operation: name of the caller's method, for the error message.
        :raises AffinityError: another event loop or none is running.
        :raises ForkedProcessError: this process was forked from the one that opened this object.
        """
        if self._closed:
            return
        if self._owner is not None:
            self._owner.check(self, operation)
        elif self._domain is not None:
            check_caller(self._domain, operation)

    @property
    def _orphaned(self) -> bool:
        """Whether the event loop that opened this object is closed, so that any other loop may close the object."""
        return self._owner is not None and self._owner.orphaned

    @property
    def _inherited(self) -> bool:
        """Whether this process was forked from the process that opened this object."""
        return self._owner is not None and self._owner.inherited

    async def __aenter__(self) -> Self:
        return await self.open()

    def close(self) -> None:
        """Stop listening, and end all handshakes and connections that this object still owns, without waiting.

        This can be called at any moment, in a callback or while the event loop is shutting down. When it returns, the
        port is free, and the peers have been notified, except for those on a worker of a pool and those in the TLS
        handshake, which the loops notify in their next turns. The rest is done in the background, and `aclose` waits
        for that. Closing twice has no effect.

        On another thread than that of the loop that opened this object, or while another loop is running, this only
        schedules the call on that loop. If that loop is closed, the TCP sockets are closed here. A finalizer may be
        called on any thread, on that of the loop too, within any call. In a forked child this method does nothing: the
        object belongs to the parent.
        """
        owner = self._owner
        if owner is None or self._is_closing or self._closed or owner.inherited:
            return
        loop = owner.loop
        assert loop is not None
        is_stopped_here = not loop.is_running() and not loop.is_closed() and self._thread == threading.get_ident()
        if owner.owns() or is_stopped_here:  # no other thread uses the loop's objects
            self._close_now()
            return
        try:
            loop.call_soon_threadsafe(self._close_now)
        except RuntimeError:  # the loop is closed
            self._acceptor.destroy()

    def _close_now(self) -> None:
        """Do the work of `close` on the loop that opened this object, or on its thread while the loop does not run."""
        self._is_closing = True
        lifecycle_of(self._parent).detach(self._acceptor)
        self._acceptor.close(self._set_closed)

    def _set_closed(self) -> None:
        """Record that nothing is left to wait for after `close`."""
        self._closed = True

    @property
    def addresses(self) -> list[Address]:
        """Host and port of each address at which this object listens; empty before opening and after closing."""
        return self._acceptor.addresses

    @property
    def port(self) -> int:
        """Port at which this object listens, the same for all addresses.

        :raises ClosedResourceError: this object is not open.
        """
        if not self.addresses:
            raise ClosedResourceError(f"{self!r} is not listening, so it has no port: open it first")
        return self.addresses[0][1]

    def statistics(self) -> ServerStatistics:
        """Return a `ServerStatistics`: how many handshakes are in progress, how many connections are open, and how many
        peers were accepted and refused so far.
        """
        return self._acceptor.statistics()


def make_accept_settings(
    transport: Transport,
    ssl: TlsContext | None,
    secret: bytes | None,
    settings: ConnectionSettings | None,
    handshake_timeout_s: float,
    max_handshakes: int,
    max_connections: int | None,
) -> AcceptSettings:
    """Check arguments of `listen` or `serve`, and return them as `AcceptSettings`.

    :raises ValueError: an argument is out of range, or `transport` and `ssl` cannot be combined.
    :raises Exception: whatever the function `ssl` raises, which is called immediately.
    """
    chosen = settings if settings is not None else ConnectionSettings()
    accept_settings = AcceptSettings(ssl, secret, chosen, handshake_timeout_s, max_handshakes, max_connections)
    check_transport(transport, accept_settings.context)
    return accept_settings
