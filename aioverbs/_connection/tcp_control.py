"""TCP connection beside a queue pair, which carries the handshake and afterwards reports the loss of the peer."""

import asyncio
import contextlib
import functools
import socket
import ssl as tls
from collections.abc import Awaitable, Callable
from typing import cast

from aioverbs._connection.handshake import HEADER_BYTES, MAX_MESSAGE_BYTES, body_size
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import running_loop, wake
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs.addresses import Address
from aioverbs.errors import BrokenResourceError

__all__ = ["TcpControlChannel", "accept_tcp", "connect_tcp"]


class TcpControlChannel(asyncio.Protocol):
    """One end of a TCP connection, with or without TLS.

    If the process dies, even by SIGKILL, the kernel closes the connection. This holds even if the process has forked,
    because its children do not inherit the socket.

    Use `connect_tcp` or `accept_tcp` to create one. The attribute `error` is the exception that ended the connection;
    None if the connection has not ended.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.messages = 0  # number of complete messages of the peer
        self._data = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._on_lost: Callable[[Exception], object] | None = None
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None  # the transport's, for its descriptor only
        self._addresses: tuple[Address | None, Address | None] | None = None  # local one and the peer's
        self._loop = running_loop()
        self._is_closed = False
        self._closing: asyncio.Future[None] | None = None  # done when the connection is closed; made by `aclose`
        self._forks = forks.count

    # ---- Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and keep its socket from being inherited by forked children."""
        self._transport = cast(asyncio.Transport, transport)
        # A TLS transport gives no information any longer once it was closed twice.
        self._socket = transport.get_extra_info("socket")
        self._addresses = _shared(transport.get_extra_info("sockname")), _shared(transport.get_extra_info("peername"))
        forks.keep_from_children(self)

    def fileno(self) -> int:
        """Return the file descriptor of the socket; -1 if the connection is closed."""
        return self._socket.fileno() if self._socket is not None and not self._is_closed else -1

    def data_received(self, data: bytes) -> None:
        """Buffer data that the peer sent for the handshake. After the handshake, fail and abort the connection instead.

        Data after the handshake violates the protocol. If more than 1,024 bytes are buffered, the transport stops
        reading for good.
        """
        if self._on_lost is not None:
            self._fail(BrokenResourceError("the peer sent data on the TCP connection after the handshake"))
            self.abort()
            return
        self._data += data
        if len(self._data) > 2 * MAX_MESSAGE_BYTES and self._transport is not None:
            self._transport.pause_reading()  # a peer that follows the protocol never sends that much
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report to the waiting caller and to the callback of `watch` that the connection is closed.

        :param exc: the cause; None if the peer or this end closed the connection normally.
        """
        self._fail(exc or BrokenResourceError("the peer closed its TCP connection"))
        self._is_closed = True
        wake(self._closing)

    def _fail(self, error: Exception) -> None:
        """Store the exception `error`, and report it to the caller of `receive` and the callback of `watch`. If an
        exception is already stored, do nothing.
        """
        if self.error is not None:
            return
        self.error = error
        self._wake()
        if self._on_lost is not None:
            self._on_lost(error)

    def _wake(self) -> None:
        wake(self._waiter)

    # ---- Handshake

    async def begin(
        self, prepare: Callable[[], Awaitable[MessageChannel]], initiator: bool, attributes: QpAttrs
    ) -> None:
        """Do nothing: the handshake exchanges what connecting the queue pair needs."""

    async def send(self, *messages: bytes) -> None:
        """Send messages without waiting: the transport can always buffer messages of the handshake.

        All go into one segment, so that a peer that rejects the first one leaves none unread: closing its socket would
        then reset the connection, and discard the rejection. Nothing is raised if the peer is gone: `receive` reports
        that.

        :param messages: the messages, headers included.
        """
        assert self._transport is not None
        self._transport.write(b"".join(messages))

    async def receive(self) -> bytes:
        """Wait for the peer's next message of the handshake.

        :returns: the message, header included.
        :raises HandshakeError: the data is not a message of the handshake.
        :raises BrokenResourceError: the peer is gone.
        """
        if len(self._data) < HEADER_BYTES:
            await self._wait_for(HEADER_BYTES)
        size = HEADER_BYTES + body_size(bytes(self._data[:HEADER_BYTES]))
        if len(self._data) < size:
            await self._wait_for(size)
        message = bytes(self._data[:size])
        del self._data[:size]
        self.messages += 1
        return message

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits for the peer's next message."""
        return self._waiter is not None and not self._waiter.done()

    async def _wait_for(self, size: int) -> None:
        """Wait until at least `size` bytes from the peer are buffered.

        :raises BrokenResourceError: the connection ended before that many bytes arrived.
        """
        while len(self._data) < size:
            if self.error is not None:
                raise BrokenResourceError(f"the peer went away during the handshake: {self.error}") from self.error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # ---- After the handshake

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """End the handshake. From now on, `on_lost` is called when the connection to the peer is lost.

        It is called immediately if the connection is already lost, or if the peer has sent data after the handshake.

        :param on_lost: called with an `Exception`, the cause.
        """
        self._on_lost = on_lost
        if self.error is not None:
            on_lost(self.error)
        elif self._data:
            self.data_received(b"")

    def unwatch(self) -> None:
        """Stop watching: the callback passed to `watch` is no longer called."""
        self._on_lost = lambda _: None

    def address(self, which: str) -> Address | None:
        """Return the local address if `which` is ``"sockname"``, or the peer's if it is ``"peername"``.

        :returns: the address, also after the end of the connection; None before the connection is made.
        """
        return self._addresses[which == "peername"] if self._addresses is not None else None

    def abort(self) -> bool:
        """Close the connection at once, without sending buffered data. Closing twice has no effect.

        When this returns, the kernel has been told to notify the peer; the event loop closes the descriptor in its next
        turn. If the event loop is closed, only the socket is shut down; in a forked child, nothing is done.

        :returns: True: nothing is left to wait for.
        """
        if self._transport is not None and self._forks == forks.count:
            self._shut_down()
            if not self._abandon_if_loop_gone():
                self._transport.abort()
        return True

    def abandon(self) -> None:
        """Shut down the socket, so that the kernel notifies the peer, in any thread. In a forked child, do nothing.

        The loop may close the socket at the same moment, and another file may get its number. Therefore this uses a
        number of its own; if no descriptor is left, nothing is done.
        """
        if self._forks == forks.count and self._socket is not None and not self._is_closed:
            with contextlib.suppress(OSError), self._socket.dup() as own:
                self._shut_down_own(own)

    def _shut_down(self) -> None:
        """Shut down the socket in both directions, which notifies the peer at once. This needs no free descriptor.

        This is called on the loop, or after its end, so that nothing closes the socket in the meantime.
        """
        descriptor = self.fileno()
        if descriptor < 0:
            return
        with contextlib.suppress(OSError):
            borrowed = socket.socket(fileno=descriptor)
            try:
                self._shut_down_own(borrowed)
            finally:
                borrowed.detach()

    def _shut_down_own(self, own: socket.socket) -> None:
        """Shut down a socket that was made from the number of this channel's socket.

        A transport whose end has not been reported yet may have closed its descriptor, and the number may be that of
        another file by now. So the addresses are compared before the socket is shut down.

        :raises OSError: the number is not that of a connected socket.
        """
        if self._addresses == (own.getsockname(), own.getpeername()):
            own.shutdown(socket.SHUT_RDWR)

    def _abandon_if_loop_gone(self) -> bool:
        """Return whether the transport must not be used, because its event loop is closed or belongs to the parent.

        If the loop is closed, also shut down the socket to notify the peer, because a closed loop closes no transports.
        In a forked child nothing is done: the loop and the sockets that the kernel watches for it belong to the parent.
        """
        if self._forks != forks.count:
            return True
        if not self._loop.is_closed():
            return False
        self._transport = None
        self._shut_down()
        return True

    async def aclose(self) -> None:
        """Send buffered data and close the connection. Wait at most half a second for that, then abort the connection.

        If the event loop is closed, only the socket is shut down; in a forked child, nothing is done.
        """
        if self._transport is not None and not self._is_closed and not self._abandon_if_loop_gone():
            self._transport.close()
            if self._closing is None:
                self._closing = self._loop.create_future()
            done, _ = await asyncio.wait([self._closing], timeout=_CLOSE_TIMEOUT_S)
            if not done:  # such as when TLS waits for the peer's close_notify
                self._transport.abort()


_CLOSE_TIMEOUT_S = 0.5


@functools.lru_cache(maxsize=256)
def _shared_host(host: str) -> str:
    """Return the same object for equal hosts, the last ones at least. `sys.intern` would keep those of all peers."""
    return host


def _shared(address: Address | None) -> Address | None:
    """Return an address whose host is the same object for all connections with this host; None if the peer is gone."""
    return (_shared_host(address[0]), *address[1:]) if address is not None else None


async def connect_tcp(
    host: str, port: int, context: tls.SSLContext | None, server_hostname: str | None
) -> TcpControlChannel:
    """Connect to a TCP port, and perform the TLS handshake if there is a context. The caller limits the time.

    :param host: address or name of the peer.
    :param port: port at which the peer listens, 1..65535, which the caller has checked.
    :param context: TLS context; None for no TLS.
    :param server_hostname: name in the peer's certificate; None for `host`.
    :returns: the connected control channel, to be closed by the caller.
    :raises OSError: the name has no address, nothing listens at the address, no file descriptor is left, or (as
        `ssl.SSLError`) the TLS handshake failed.
    """
    name = server_hostname if context is not None else None
    _, control = await running_loop().create_connection(
        TcpControlChannel, host, port, ssl=context, server_hostname=name
    )
    return control


async def accept_tcp(sock: socket.socket, context: tls.SSLContext | None, timeout_s: float) -> TcpControlChannel:
    """Make a control channel from an accepted socket, and perform the TLS handshake if there is a context.

    :param sock: connected, non-blocking socket. It is closed together with the channel, and if this call fails.
    :param context: TLS context; None for no TLS.
    :param timeout_s: limit of the TLS handshake in seconds.
    :returns: the connected control channel, to be closed by the caller.
    :raises OSError: the peer is gone, or the TLS handshake failed (`ssl.SSLError`) or took too long.
    """
    limit_s = timeout_s if context is not None else None
    control = TcpControlChannel()
    try:
        await running_loop().connect_accepted_socket(lambda: control, sock, ssl=context, ssl_handshake_timeout=limit_s)
    except BaseException:
        sock.close()
        raise
    return control
