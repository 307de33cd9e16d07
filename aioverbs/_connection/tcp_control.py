"""The TCP connection beside a queue pair: it carries the handshake, and then tells that the peer is there no more."""

import asyncio
import contextlib
import errno
import socket
import ssl as tls
from asyncio.trsock import TransportSocket
from collections.abc import Callable
from typing import cast

from aioverbs._connection.handshake import HEADER_BYTES, MAX_MESSAGE_BYTES, body_size
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import running_loop, wake
from aioverbs.addresses import Address
from aioverbs.errors import BrokenResourceError

__all__ = ["TcpControlChannel", "accept_tcp", "connect_tcp"]


class TcpControlChannel(asyncio.Protocol):
    """One end of a TCP connection, with TLS or without.

    Whoever dies, even by a signal that leaves no time for anything, has it closed by the kernel, whatever children it
    has: they do not get it.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.has_received = False  # the peer said something
        self._data = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._on_lost: Callable[[Exception], object] | None = None
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = running_loop().create_future()
        self._forks = forks.count

    # ---- What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        self._transport = cast(asyncio.Transport, transport)
        forks.keep_from_children(self)

    def fileno(self) -> int:
        """Return the number of its descriptor; -1 where it is closed."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return sock.fileno() if sock is not None and not self._closed.done() else -1

    def data_received(self, data: bytes) -> None:
        """The peer said something."""
        self.has_received = True
        if self._on_lost is not None:
            self._fail(BrokenResourceError("the peer said something where nothing is to be said any more"))
            self.abort()
            return
        self._data += data
        if len(self._data) > 2 * MAX_MESSAGE_BYTES and self._transport is not None:
            self._transport.pause_reading()  # nobody who takes his turn says so much
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._fail(exc or BrokenResourceError("the peer closed its TCP connection"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        self._wake()
        if self._on_lost is not None:
            self._on_lost(error)

    def _wake(self) -> None:
        wake(self._waiter)

    # ---- The handshake

    async def send(self, data: bytes) -> None:
        """Say something; it is so short that nobody has to wait."""
        assert self._transport is not None
        self._transport.write(data)

    async def receive(self) -> bytes:
        """The peer's next message.

        :raises HandshakeError: it is none.
        :raises BrokenResourceError: the peer is gone.
        """
        head = await self._read_exactly(HEADER_BYTES)
        return head + await self._read_exactly(body_size(head))

    async def _read_exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            if self.error is not None:
                raise BrokenResourceError(f"the peer went during the handshake: {self.error}") from self.error
            self._waiter = running_loop().create_future()
            await self._waiter
        data = bytes(self._data[:size])
        del self._data[:size]
        return data

    # ---- Afterwards

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """The handshake is over: call this when the peer is gone."""
        self._on_lost = on_lost
        if self.error is not None:
            on_lost(self.error)
        elif self._data:
            self.data_received(b"")

    def unwatch(self) -> None:
        """Nobody is to be called any more."""
        self._on_lost = lambda _: None

    def address(self, which: str) -> Address | None:
        """Its own address, `sockname`, or the peer's, `peername`."""
        found = self._transport.get_extra_info(which) if self._transport is not None else None
        return cast("Address | None", found)

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None and not self._abandon_if_loop_gone():
            self._transport.abort()

    def _abandon_if_loop_gone(self) -> bool:
        """Whether its loop is closed, which closes no transport any more: then just the peer is told. Or whether it is
        the parent's of this process, and so is what the kernel watches for it: then nothing is done."""
        if self._forks != forks.count:
            return True
        if not self._closed.get_loop().is_closed():
            return False
        transport, self._transport = self._transport, None
        sock = transport.get_extra_info("socket") if transport is not None else None
        if isinstance(sock, TransportSocket):  # others were closed with their loop
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return True

    async def aclose(self) -> None:
        """End it, after what was said."""
        if self._transport is not None and not self._closed.done() and not self._abandon_if_loop_gone():
            self._transport.close()
            done, _ = await asyncio.wait([self._closed], timeout=_CLOSE_TIMEOUT_S)
            if not done:  # as where TLS waits for the other end's goodbye
                self._transport.abort()


_CLOSE_TIMEOUT_S = 0.5


async def connect_tcp(
    host: str, port: int, context: tls.SSLContext | None, server_hostname: str | None
) -> TcpControlChannel:
    """Connect to a TCP port.

    :raises OSError: nobody is there; of these, `ssl.SSLError`: TLS does not come about.
    """
    name = server_hostname if context is not None else None
    _, control = await running_loop().create_connection(
        TcpControlChannel, host, port, ssl=context, server_hostname=name
    )
    _no_delay(control)
    return control


async def accept_tcp(sock: socket.socket, context: tls.SSLContext | None, timeout_s: float) -> TcpControlChannel:
    """Take over a socket that was accepted; from now on it is the lifeline's.

    :raises OSError: the peer is gone; of these, `ssl.SSLError`: TLS does not come about.
    """
    limit_s = timeout_s if context is not None else None
    control = TcpControlChannel()
    try:
        await running_loop().connect_accepted_socket(lambda: control, sock, ssl=context, ssl_handshake_timeout=limit_s)
    except BaseException:
        sock.close()
        raise
    _no_delay(control)
    return control


def _no_delay(control: TcpControlChannel) -> None:
    assert control._transport is not None
    sock = control._transport.get_extra_info("socket")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:  # it is gone already
        if error.errno not in (errno.EINVAL, errno.ENOTCONN):
            raise
