"""Control channel of a queue pair that rdma_cm connects.

The handshake goes over the queue pair itself. Events of rdma_cm report the loss of the peer.
"""

import errno
import ipaddress
from collections.abc import Awaitable, Callable

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
"""Errors of rdma_cm after which the peer may still be reachable by TCP."""


class SharedChannel:
    """Event channel of rdma_cm with a reference count. Releasing the last reference closes the channel.

    The maker of this object holds the first reference.
    """

    def __init__(self) -> None:
        self.channel = Channel()
        self._users = 1

    async def open(self) -> None:
        """Open the event channel. Call this only once.

        :raises LibraryNotFoundError: librdmacm is not installed.
        :raises VerbsError: the kernel module rdma_ucm is not loaded, or the process may not use it.
        """
        await open_part(self.channel)

    def acquire(self) -> None:
        """Add a reference to the channel, to be dropped with `release`."""
        self._users += 1

    async def release(self) -> None:
        """Drop a reference to the channel. Dropping the last reference closes the channel.

        :raises VerbsError: the channel cannot be closed. The reference is dropped nevertheless.
        """
        self._users -= 1
        if not self._users:
            await self.channel.aclose()


class CmControlChannel:
    """Control channel of a queue pair that an rdma_cm identifier connects.

    :param identifier: open identifier, which `aclose` closes.
    :param shared_channel: event channel of the identifier. The caller has acquired a reference, which `aclose`
        releases.
    """

    def __init__(self, identifier: Identifier, shared_channel: SharedChannel) -> None:
        self.identifier = identifier
        suppress_warning(identifier)
        self._shared_channel: SharedChannel | None = shared_channel
        self._message_channel: MessageChannel | None = None

    async def begin(
        self, prepare: Callable[[], Awaitable[MessageChannel]], initiator: bool, attributes: QpAttrs
    ) -> None:
        """Connect the queue pair to the peer's: `Identifier.connect` or `Identifier.accept` without a time limit.

        :param prepare: function that creates the queue pair, posts its receives and returns its message channel.
        :param initiator: whether this end requested the connection.
        :param attributes: attributes of the queue pair that replace the negotiated ones.
        :raises ConnectionRejectedError: the peer rejected the connection, has no listener, or gave up.
        :raises UnreachableError: the peer's connection manager does not answer.
        :raises VerbsError: a verb failed.
        :raises Exception: any other exception that `prepare`, `Identifier.connect` or `Identifier.accept` raises.
        """
        self._message_channel = message_channel = await prepare()
        await self._connect(message_channel, initiator, attributes)

    async def _connect(self, message_channel: MessageChannel, initiator: bool, attributes: QpAttrs) -> None:
        """Do the work of `begin` once the queue pair is prepared."""
        connect = self.identifier.connect if initiator else self.identifier.accept
        await connect(message_channel.qp, timeout_s=None, **attributes)

    async def send(self, *messages: bytes) -> None:
        """Send messages of the handshake over the queue pair, and wait until the peer's device acknowledges each.

        :param messages: the messages, headers included.
        :raises QueuePairStateError: `begin` has not prepared the queue pair.
        :raises BrokenResourceError: the peer's device does not acknowledge the message.
        :raises Exception: any other exception that `MessageChannel.send_handshake` raises.
        """
        if self._message_channel is None:
            raise QueuePairStateError("the queue pair is not connected")
        for message in messages:
            await self._message_channel.sender.send_handshake(message)

    async def receive(self) -> bytes:
        """Wait for the peer's next message of the handshake. Call `begin` first.

        :returns: the message, header included.
        :raises BrokenResourceError: the peer is gone.
        :raises Exception: any other exception that `MessageChannel.receive_handshake` raises.
        """
        assert self._message_channel is not None
        return await self._message_channel.receiver.receive_handshake()

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call `on_lost` when the peer disconnects or the device is removed; immediately if that has already happened.

        :param on_lost: called with an `Exception`, the cause. From now on, this function has to move the queue pair to
            ERR, because the identifier no longer does.
        """
        self._watch(on_lost)

    def unwatch(self) -> None:
        """Stop watching: the callback passed to `watch` is no longer called."""
        self._watch(None)

    def _watch(self, on_lost: Callable[[Exception], object] | None) -> None:
        """Set the callback for the loss of the peer, see `watch`; None removes it.

        The callback is called within this call if the peer is already lost. Do nothing if the identifier was never
        opened.
        """
        state_machine = cm_state_machine_of(self.identifier)
        if state_machine is not None:
            state_machine.watch(on_lost)

    def address(self, which: str) -> Address | None:
        """Return the local address if `which` is ``"sockname"``, else the peer's; None if the channel is closed.

        :raises ClosedResourceError: the identifier was never opened.
        """
        if self.identifier.closed:
            return None
        return self.identifier.local_address if which == "sockname" else self.identifier.peer_address

    def abort(self) -> bool:
        """Start disconnecting without waiting for the peer's answer. The identifier stays open until `aclose`.

        This has no effect if the queue pair is not connected.

        :returns: whether the identifier is closed.
        """
        state_machine = cm_state_machine_of(self.identifier)
        if state_machine is not None and not self.identifier.closed:
            state_machine.disconnect()
        return self.identifier.closed

    def abandon(self) -> None:
        """Do nothing: only the owner may call verbs. After the end of its loop, the domain's closing does the rest."""

    async def aclose(self) -> None:
        """Disconnect from the peer, close the identifier and release the reference to its channel, even if cancelled.

        This waits at most one second for the peer's answer. Closing twice has no effect.

        :raises VerbsError: a verb failed. The reference to the channel is released nevertheless.
        """
        try:
            await self.identifier.aclose()
        finally:
            shared_channel, self._shared_channel = self._shared_channel, None
            if shared_channel is not None:
                await shared_channel.release()


def _source_address(gid: bytes, peer: Address) -> str | None:
    """Return the local IP address to connect from, taken from the GID of the local port (RoCE).

    :param gid: GID of the local port, 16 bytes.
    :param peer: address of the peer.
    :returns: the address as text; None if the GID contains no IPv4 address for an IPv4 peer, or no global IPv6 address
        for an IPv6 peer.
    """
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped is not None and ":" not in peer[0]:
        return str(address.ipv4_mapped)
    return str(address) if address.is_global and ":" in peer[0] else None


async def resolve(host: str, port: int, context: handles.Context, gid: bytes) -> CmControlChannel:
    """Resolve the address of a peer and the route to it from a given port of a local device.

    The wait for the address has no limit: the caller limits the time.

    :param host: address or name of the peer.
    :param port: port number at which the peer listens, 1..65535, which the caller has checked.
    :param context: context of the local device.
    :param gid: GID of the local device's port.
    :returns: a control channel whose identifier is resolved but not yet connected. The caller closes the channel.
    :raises LibraryNotFoundError: librdmacm is not installed.
    :raises UnreachableError: the kernel module rdma_ucm is not loaded, there is no route to the peer, the route uses
        another device, or `host` is a loopback address.
    :raises VerbsError: another verb of rdma_cm failed.
    :raises BrokenResourceError: an unexpected event arrived, for example because the device was removed.
    :raises OSError: the name has no address.
    :raises TimeoutError: the kernel found no route within a minute.
    """
    device = context.name
    shared_channel = SharedChannel()
    try:
        await shared_channel.open()
    except VerbsError as error:  # the kernel module rdma_ucm is not loaded
        raise UnreachableError(error.verb, error.errno, error.advice) from error
    identifier = shared_channel.channel.identifier()
    try:
        await open_part(identifier)
        address = await look_up(host, port)
        # a loopback address is not reachable from another source address
        if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
            raise UnreachableError("rdma_resolve_addr", errno.ENODEV)
        source = _source_address(gid, address)
        await identifier.resolve(host, port, source=source, timeout_s=None)
        if identifier.device_name != device:
            advice = f"the route uses {identifier.device_name}, the domain is of {device}: open that device"
            raise UnreachableError("rdma_resolve_addr", errno.ENODEV, advice)
    except BaseException:
        await CmControlChannel(identifier, shared_channel).aclose()
        raise
    return CmControlChannel(identifier, shared_channel)
