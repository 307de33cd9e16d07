"""Interface of the channels beside a queue pair, which carry the handshake and report the loss of the peer."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from aioverbs._connection.message_channel import MessageChannel
from aioverbs._verbs.qp_state_machine import QpAttrs
from aioverbs.addresses import Address

__all__ = ["ControlChannel"]


class ControlChannel(Protocol):
    """Channel that carries the handshake and reports the loss of the peer.

    Implemented by `TcpControlChannel` and `CmControlChannel`.
    """

    async def begin(
        self, prepare: Callable[[], Awaitable[MessageChannel]], initiator: bool, attributes: QpAttrs
    ) -> None:
        """Prepare to send and receive. With rdma_cm, this connects the queue pair, over which the handshake then goes.
        With TCP nothing is done: the handshake exchanges what connecting the queue pair needs.

        :param prepare: function that creates the queue pair, posts its receives and returns its message channel.
        :param initiator: whether this end requested the connection.
        :param attributes: attributes of the queue pair that replace those that rdma_cm negotiates.
        :raises Exception: with rdma_cm: whatever `prepare` or `CmControlChannel.begin` raises.
        """

    async def send(self, *messages: bytes) -> None:
        """Send messages of the handshake, in order.

        :param messages: the messages, headers included.
        :raises BrokenResourceError: with rdma_cm: the peer's device does not acknowledge a message. With TCP this
            method raises nothing: `receive` reports that the peer is gone.
        :raises Exception: with rdma_cm: any other exception that `CmControlChannel.send` raises.
        """

    async def receive(self) -> bytes:
        """Wait for the peer's next message of the handshake.

        :returns: the message, header included.
        :raises HandshakeError: with TCP: the data is not a message of the handshake.
        :raises BrokenResourceError: the peer is gone.
        :raises Exception: with rdma_cm: any other exception that `CmControlChannel.receive` raises.
        """

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call `on_lost` with the cause, an exception, once the peer is gone; within this call if it already is."""

    def unwatch(self) -> None:
        """Stop watching: the callback passed to `watch` is no longer called."""

    def address(self, which: str) -> Address | None:
        """Return the local address if `which` is ``"sockname"``, or the peer's if it is ``"peername"``.

        :returns: the address; None if the channel is not connected yet. After the channel is closed: None with rdma_cm,
            the last address with TCP.
        """

    def abort(self) -> bool:
        """End the connection to the peer at once, without waiting for the peer.

        :returns: True if nothing is left to do; False if `aclose` still has to be awaited.
        """

    def abandon(self) -> None:
        """Notify the peer at once if that needs no event loop, as with TCP. This can be called in any thread.

        The channel stays open: `abort` has to be called on the loop, unless the loop is closed.
        """

    async def aclose(self) -> None:
        """Close the channel, and wait a limited time for the peer to close its end.

        :raises VerbsError: with rdma_cm: a verb failed.
        """
