"""Messages of any size over a queue pair, in both directions."""

from dataclasses import dataclass

from aioverbs._connection.channel_state import ChannelState, ChannelUser
from aioverbs._connection.credits import max_announced
from aioverbs._connection.message_receiver import MessageReceiver
from aioverbs._connection.message_sender import MessageSender
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._core.data_path.data_path import Credits
from aioverbs._core.software.software import give_back_pages
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.queue_pair import QueuePair

__all__ = ["ConnectionStatistics", "MessageChannel"]


@dataclass(frozen=True)
class ConnectionStatistics:
    """Counters of a connection. Returned by `Connection.traffic`.

    :param messages_sent: number of user messages sent.
    :param messages_received: number of user messages returned by ``receive``.
    :param credits: number of credits available, each for one receive of the peer. One of them is reserved for returning
        credits.
    :param owed: number of credits not yet returned to the peer.
    :param waits: number of times that a message waited for a credit or a buffer.
    :param updates: number of messages sent only to return credits.
    """

    messages_sent: int
    messages_received: int
    credits: int
    owed: int
    waits: int
    updates: int


class MessageChannel(ChannelState):
    """Messages over the queue pair of a connection.

    Each frame uses a receive of the peer: a message, a fragment of one, or several short messages that are sent
    together. The sender has a credit for each receive that the peer has posted, so no send is ever answered with an RNR
    NAK. A receive is posted again as soon as its bytes are copied, but its credit is returned only when the user
    receives its messages: a peer whose messages are not read cannot send more. A peer that sends without a credit
    breaks the connection. So the unread data here is never more than the receives can hold, plus one incomplete
    message.

        sender                                     receiver
        uses a credit, sends a fragment   ->
                                                   copies the bytes, posts the receive again
                                                   queues the message
                                                   user calls receive(): credit is owed
        adds the credits                  <-       next message, or CREDITS, returns what is owed

    Before `start` is called, messages are sent and received unframed: they are the handshake over a queue pair that
    rdma_cm connected.

    The methods to send and to receive are those of the attributes ``sender`` and ``receiver``.

    :param qp: queue pair of type RC, in RESET.
    :param owner: owner of the connection, even if any loop may use the queue pair.
    :param block: memory for the buffers.
    :param settings: sizes of this end.
    :param domain: domain that the memory for received messages is registered with.
    :param user: user of the channel.
    """

    __slots__ = ("_credits", "_settings", "receiver", "sender")

    def __init__(
        self,
        qp: QueuePair,
        owner: Affinity,
        block: LeasedBuffer,
        settings: ConnectionSettings,
        domain: Domain,
        user: ChannelUser,
    ) -> None:
        super().__init__(qp, owner, user)
        self._settings = settings
        self._credits: Credits | None = None
        receives = settings.receive_depth + 1  # one more than the peer gets credits, for the handshake
        size = settings.buffer_size
        self.sender = MessageSender(self, block, receives * size, settings.send_buffers, size)
        self.receiver = MessageReceiver(self, self.sender, block, receives, settings, domain)

    def start(self, depth: int, buffer_size: int, max_message: int, handshake_messages: int, announces: bool) -> None:
        """Set the sizes and credits from the peer's offer. From now on, messages are framed.

        Only the remaining handshake messages still arrive unframed.

        :param depth: number of receives that the peer keeps posted.
        :param buffer_size: size of each of these receives, in bytes.
        :param max_message: size of the longest message that the peer accepts, in bytes.
        :param handshake_messages: number of handshake messages that have yet to arrive on the queue pair.
        :param announces: whether both ends announce long messages.
        :raises ValueError: `depth` is not in 4..1023.
        """
        own_depth = self._settings.receive_depth
        if announces:
            self._credits = Credits(depth + 1 - max_announced(depth), own_depth + 1 - max_announced(own_depth))
            self.receiver.max_announced = max_announced(depth)
        else:
            self._credits = Credits(depth, own_depth)
        fragment_size = min(buffer_size, self._settings.buffer_size)
        self.sender.start(self._credits, depth, fragment_size, max_message, announces)
        self.receiver.start(self._credits, handshake_messages)

    def give_back_pages(self) -> None:
        """Give the pages of buffers back to the kernel, which provides new ones when they are used again: those of all
        posted receives, and of the send buffers if none is in use; and those of the rings to the peer's process. Do
        nothing on devices that pin memory.

        :raises BusyResourceError: another thread is changing the state of the queue pair.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        give_back_pages(self.qp.handle, *self.sender.frames.unused_memory)

    def _report_end(self) -> None:
        """Wake all that wait for a message or a credit, do the rest, and send the last frame."""
        self.sender.frames.refuse()
        self.sender.wake_waiter()
        self.receiver.end_inbox()
        try:
            super()._report_end()
        finally:
            self.sender.frames.close()

    def statistics(self) -> ConnectionStatistics:
        """Return a `ConnectionStatistics`: the numbers of messages sent and received so far, of credits available and
        not yet returned to the peer, of waits, and of messages that only returned credits. All are 0 before `start` is
        called.
        """
        credit, sender = self._credits, self.sender
        free, owed = (credit.available, credit.owed) if credit is not None else (0, 0)
        received = self.receiver.unread.received
        return ConnectionStatistics(sender.messages, received, free, owed, sender.waits, sender.updates)


publish(__name__)
