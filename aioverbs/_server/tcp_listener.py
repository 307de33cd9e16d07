"""Listening TCP sockets: peers are accepted while there is room for them, and else wait in the kernel's backlog."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import running_loop
from aioverbs.addresses import Address

__all__ = ["TcpListener", "resolve"]

logger = logging.getLogger("aioverbs")

_ACCEPT_RETRY_S = 0.1  # delay after a failed accept
_ACCEPTS_PER_TURN = 16  # then other tasks of the loop run


SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]
"""Address family of a socket, and an address in the form of that family."""


async def resolve(host: str | None, port: int) -> list[SocketAddress]:
    """Return the addresses at which to listen for peers that connect to `host`.

    :param host: address or name; None for all addresses of this machine.
    :param port: port to listen at, 0..65535.
    :raises OSError: the name has no address.
    """
    found = await running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, family=socket.AF_UNSPEC
    )
    return [(family, address) for family, _, _, _, address in dict.fromkeys(found)]


class TcpListener:
    """Listening sockets at all addresses of a host.

    The loop that opens the listener owns it, and calls all functions. Opening begins to accept peers; `pause` and
    `resume` stop and continue that. There is no task: the loop calls back when a peer has arrived, so that `close`
    needs no wait.

    :param has_room: function that returns whether one more peer may be accepted.
    :param on_full: function that is called when a peer waits for room; the listener has paused.
    :param on_peer: function that is called with the connected, non-blocking socket and the address of each peer, and
        that takes over the socket.
    """

    def __init__(
        self,
        has_room: Callable[[], bool],
        on_full: Callable[[], object],
        on_peer: Callable[[socket.socket, Address], object],
    ) -> None:
        self._has_room = has_room
        self._on_full = on_full
        self._on_peer = on_peer
        self._sockets: list[socket.socket] = []
        self._watched: list[int] = []  # descriptors for which the loop calls `_on_readable`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = forks.count
        self._retry: asyncio.TimerHandle | None = None
        self.addresses: list[Address] = []  # of the sockets; a forked child cannot get them from the sockets

    def open(self, addresses: list[SocketAddress], backlog: int) -> None:
        """Listen at some addresses, and accept peers. On failure, the caller has to call `close`.

        :param addresses: addresses that `resolve` returned. If their port is 0, a free one is used, the same for all.
        :param backlog: number of peers that the kernel queues for each address.
        :raises OSError: an address is in use or does not belong to this machine, or no file descriptor is left.
        """
        self._loop = running_loop()
        for family, address in addresses:
            if address[1] == 0 and self.addresses:
                address = (address[0], self.addresses[0][1], *address[2:])
            self._listen(family, address, backlog)
        self.resume()

    def _listen(self, family: int, address: tuple[object, ...], backlog: int) -> None:
        """Open a listening socket for one address and store it. Do nothing if the machine lacks the address family.

        :raises OSError: the address is in use or does not belong to this machine, or no file descriptor is left.
        """
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:  # such as when IPv6 is disabled
                return
            raise
        self._sockets.append(sock)
        forks.keep_from_children(sock)  # else peers could still connect to a child after this process has ended
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
        self.addresses.append(sock.getsockname())

    @property
    def is_open(self) -> bool:
        """Whether there are listening sockets."""
        return bool(self._sockets)

    def resume(self) -> None:
        """Accept peers, those that wait in the backlog first. Do nothing if peers are accepted already, or in a forked
        child.
        """
        if self._watched or self._loop is None or self._forks != forks.count:
            return
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._on_readable, sock)
            self._watched.append(sock.fileno())

    def pause(self) -> None:
        """Leave further peers in the kernel's backlog until `resume` is called."""
        watched, self._watched = self._watched, []
        # A forked child shares the loop's epoll set with its parent, and must not remove anything from it.
        if self._loop is not None and not self._loop.is_closed() and self._forks == forks.count:
            for descriptor in watched:
                self._loop.remove_reader(descriptor)

    def _on_readable(self, listening: socket.socket) -> None:
        """Accept the peers that wait at a listening socket, as many as there is room for.

        A failure to accept is logged, and accepting is retried. In a forked child, whose copy of the loop may run on,
        do nothing: the peers belong to the parent.
        """
        if self._forks != forks.count:
            return
        if not self._has_room():
            self.pause()
            self._on_full()
            return
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:  # the peer gave up before it was accepted
                    continue
                # Such as while the process or the machine has no more file descriptors.
                logger.warning("accepting peers failed, retrying: %s", error)
                self.pause()
                self._retry = running_loop().call_later(_ACCEPT_RETRY_S, self.resume)
                return
            forks.keep_from_children(sock)
            sock.setblocking(False)
            self._on_peer(sock, address)
            if not self._watched or not self._has_room():
                return

    def close(self) -> None:
        """Close the sockets, so that their port is free. Peers in the backlog are reset. Closing twice has no effect.

        This can be called from any thread once the loop is closed.
        """
        self.pause()
        if self._retry is not None:
            self._retry.cancel()
        sockets, self._sockets = self._sockets, []
        self.addresses.clear()
        for sock in sockets:
            sock.close()
