"""Queue pairs that rdma_cm connects: the handshake goes over them, and it tells of the peer's end."""

import errno
import ipaddress
from collections.abc import Callable
from typing import Unpack

from aioverbs._connection.message_channel import MessageChannel
from aioverbs._core.handles import handles
from aioverbs._lifecycle.resource import open_part, suppress_warning
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs.addresses import Address
from aioverbs.errors import (
    ConnectionRejectedError,
    LibraryNotFoundError,
    QueuePairStateError,
    UnreachableError,
    VerbsError,
)
from aioverbs.rdma_cm import Channel
from aioverbs.rdma_cm.cm_id import Identifier, cm_state_machine_of, look_up

__all__ = ["CM_UNAVAILABLE_ERRORS", "CmControlChannel", "SharedChannel", "resolve"]

CM_UNAVAILABLE_ERRORS = (LibraryNotFoundError, UnreachableError, ConnectionRejectedError)
"""What says that a peer is not to be had by rdma_cm; it may be by TCP."""


class SharedChannel:
    """A channel that is closed with the last who uses it. Who makes it is one of those, once it is open."""

    def __init__(self) -> None:
        self.channel = Channel()
        self._users = 1

    async def open(self) -> None:
        """Open the channel.

        :raises LibraryNotFoundError: librdmacm is not installed.
        :raises VerbsError: the kernel's module is not loaded.
        """
        await open_part(self.channel)

    def acquire(self) -> None:
        """One more uses it."""
        self._users += 1

    async def release(self) -> None:
        """One of them does not any more."""
        self._users -= 1
        if not self._users:
            await self.channel.aclose()


class CmControlChannel:
    """A queue pair and its identifier, as a line of a connection.

    :param identifier: open; this closes it.
    :param channel: that it is of; this has used it already.
    """

    def __init__(self, identifier: Identifier, shared_channel: SharedChannel) -> None:
        self.identifier = identifier
        suppress_warning(identifier)
        self._shared_channel: SharedChannel | None = shared_channel
        self._message_channel: MessageChannel | None = None

    async def connect(self, message_channel: MessageChannel, **attributes: Unpack[QpAttrs]) -> None:
        """Connect the queue pair: of who asks.

        :raises ConnectionRejectedError: nobody listens there, or who does refused.
        :raises UnreachableError: the peer does not answer.
        """
        self._message_channel = message_channel
        await self.identifier.connect(message_channel.qp, timeout_s=None, **attributes)

    async def accept(self, message_channel: MessageChannel, **attributes: Unpack[QpAttrs]) -> None:
        """Connect the queue pair: of who is asked."""
        self._message_channel = message_channel
        await self.identifier.accept(message_channel.qp, timeout_s=None, **attributes)

    async def send(self, data: bytes) -> None:
        """Say something.

        :raises QueuePairStateError: the queue pair is not connected yet.
        """
        if self._message_channel is None:
            raise QueuePairStateError("the queue pair is not connected yet: connect() or accept() first")
        await self._message_channel.send_handshake(data)

    async def receive(self) -> bytes:
        """The peer's next message."""
        assert self._message_channel is not None
        return await self._message_channel.receive_handshake()

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call this when the peer has disconnected, or the device was removed; it ends the queue pair."""
        self._watch(on_lost)

    def unwatch(self) -> None:
        """Call nobody any more."""
        self._watch(None)

    def _watch(self, on_lost: Callable[[Exception], object] | None) -> None:
        state_machine = cm_state_machine_of(self.identifier)
        if state_machine is not None:
            state_machine.watch(on_lost)

    def address(self, which: str) -> Address | None:
        """Its own address, `sockname`, or the peer's, `peername`."""
        if self.identifier.closed:
            return None
        return self.identifier.local_address if which == "sockname" else self.identifier.peer_address

    def abort(self) -> None:
        """Tell the peer that it is over."""
        state_machine = cm_state_machine_of(self.identifier)
        if state_machine is not None and not self.identifier.closed:
            state_machine.disconnect()

    async def aclose(self) -> None:
        """Disconnect, and close the identifier, and the channel, where this is cancelled, too."""
        try:
            await self.identifier.aclose()
        finally:
            shared_channel, self._shared_channel = self._shared_channel, None
            if shared_channel is not None:
                await shared_channel.release()


def _source_address(gid: bytes, peer: Address) -> str | None:
    """The address of a port that a peer is to be reached from: over Ethernet its GID has it."""
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped is not None and ":" not in peer[0]:
        return str(address.ipv4_mapped)
    return str(address) if address.is_global and ":" in peer[0] else None


async def resolve(host: str, port: int, context: handles.Context, gid: bytes) -> CmControlChannel:
    """Find the way to a peer, from a port.

    :param context: of its device.
    :param gid: its GID.
    :raises LibraryNotFoundError: librdmacm is not installed.
    :raises UnreachableError: there is no way, or another device leads there.
    """
    device = context.name
    shared_channel = SharedChannel()
    try:
        await shared_channel.open()
    except VerbsError as error:  # the kernel's module is not loaded
        raise UnreachableError(error.verb, error.errno, error.advice) from error
    identifier = shared_channel.channel.identifier()
    try:
        await open_part(identifier)
        address = await look_up(host, port)
        if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:  # from another address nobody answers there
            raise UnreachableError("rdma_resolve_addr", errno.ENODEV)
        source = _source_address(gid, address)
        await identifier.resolve(host, port, source=source, timeout_s=None)
        if identifier.device_name != device:
            advice = f"{identifier.device_name} leads there, and the domain is of {device}"
            raise UnreachableError("rdma_resolve_addr", errno.ENODEV, advice)
    except BaseException:
        await CmControlChannel(identifier, shared_channel).aclose()
        raise
    return CmControlChannel(identifier, shared_channel)
