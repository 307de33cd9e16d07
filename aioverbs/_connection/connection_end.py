"""One end of a connection: the objects that work over its queue pair, and their end."""

from collections.abc import Callable

from aioverbs._connection.announcer import Announcer
from aioverbs._connection.channel_state import Announcement
from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.grants import Grants
from aioverbs._connection.handshake import Capabilities, Offer
from aioverbs._connection.liveness import Liveness
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.one_sided import OneSidedRequests
from aioverbs._connection.recycled_memory import recycled_memory_of
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.wire import FrameKind
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._memory.buffer_pool import LeasedBuffer
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.qp_modify import init_new
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.addresses import format_address
from aioverbs.types import AccessFlags, QpState

__all__ = ["ConnectionEnd"]

_ACCESS = (
    AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
)  # operations that the queue pair allows the peer; the keys of the granted memory decide where


class ConnectionEnd:
    """One end of a connection. The lifecycle refers to this object and not to the user's `Connection`, so that a
    forgotten connection can be garbage-collected.

        Connection    public methods; opening and closing as a resource
        ConnectionEnd
          channel     messages: sender and receiver over one state
          grants      memory of this end, and of the peer
          requests    one-sided requests to memory of the peer
          liveness    keep-alive, loss of the peer
          control     TCP or rdma_cm, which carried the handshake

    :param lifecycle: node of the connection.
    :param qp: queue pair, in RESET.
    :param block: memory of the buffers, which `destroy` releases.
    :param settings: sizes and times of this end.
    :param domain: domain of the connection.
    :param owner: owner of the connection.
    :param caller: the same owner if the queue pair does not check its caller; else None.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        qp: QueuePair,
        block: LeasedBuffer,
        settings: ConnectionSettings,
        domain: Domain,
        owner: Affinity,
        caller: Affinity | None,
    ) -> None:
        self.qp = qp
        self.peer: Offer | None = None  # the peer's offer, once it has arrived
        self.channel = MessageChannel(qp, owner, block, settings, domain, self)
        self.announcer: Announcer | None = None  # None until this end announces its first message
        self.requests = OneSidedRequests(self.channel, caller)
        self.liveness = Liveness(self.channel, domain, settings.keep_alive_s)
        self.control: ControlChannel | None = None  # None until the handshake is complete
        self.closed_callback: Callable[[], object] | None = None
        self._lifecycle = lifecycle
        self._block = block
        self._base = domain.base.handle
        self._cache = domain.cache
        self._recycled_memory = recycled_memory_of(domain)
        self._settings = settings

    @property
    def grants(self) -> Grants:
        """Memory of this end, and of the peer. Made when it is first used: most idle connections have none."""
        grants = self.requests.grants
        if grants is None:
            grants = self.requests.grants = Grants(self.channel, self._base, self._settings.max_grants)
            if self.channel.broken is not None or self.channel.closed:
                grants.fail()
        return grants

    def post_receives(self) -> None:
        """Move the queue pair to INIT and post its receives, unless an earlier call has done so.

        :raises VerbsError: a verb failed.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        if self.qp.qp_state is QpState.RESET:
            init_new(self.qp, _ACCESS)
            self.channel.receiver.post_receives()

    def begin_messages(self, own: Offer, peer: Offer, handshake_messages: int) -> None:
        """Set the sizes and credits from the offers of both ends. From now on, messages may arrive.

        :param own: offer of this end.
        :param peer: offer of the peer.
        :param handshake_messages: number of handshake messages that have yet to arrive on the queue pair.
        """
        self.peer = peer
        announces = Capabilities.ANNOUNCES in own.capabilities & peer.capabilities
        self.channel.start(peer.depth, peer.buffer_size, peer.max_message, handshake_messages, announces)

    # ---- Calls of the channel

    def on_control(self, kind: FrameKind, number: int, data: bytes) -> None:
        """Handle a control message of the peer: see `Grants.on_frame`.

        :raises ValueError: the message violates the protocol.
        """
        if kind is not FrameKind.END or self.requests.grants is not None:
            self.grants.on_frame(kind, number, data)
        if kind is FrameKind.REVOKED and self.announcer is not None:
            self.announcer.wake_waiter()

    def announce(self, parts: list[memoryview], immediate: int | None) -> Announcement:
        """Announce a message: see `Announcer.announce`.

        :raises VerbsError: the device cannot be queried.
        """
        return self._get_announcer().announce(parts, immediate)

    def announce_now(self, parts: list[memoryview], immediate: int | None, is_constant: bool) -> bool:
        """Announce a message if that needs no waiting: see `Announcer.announce_now`.

        :raises VerbsError: the device cannot be queried.
        :raises Exception: any other exception that `Announcer.announce_now` raises.
        """
        return self._get_announcer().announce_now(parts, immediate, is_constant)

    def _get_announcer(self) -> Announcer:
        """Return what announces messages. Made for the first one: most idle connections never need it.

        :raises VerbsError: the device cannot be queried.
        """
        if self.announcer is None:
            self.announcer = Announcer(
                self.channel,
                self.grants,
                self._base,
                self._cache,
                self._recycled_memory,
                self._settings.receive_depth,
            )
        return self.announcer

    def on_ended(self) -> None:
        """Fail the tasks that wait for grants. If the message channel is broken, also abort the control channel, and
        let the connection be dropped without a warning.
        """
        if self.requests.grants is not None:
            self.requests.grants.fail()
        if self.channel.broken is not None:
            self._lifecycle.may_be_dropped = True
            if self.control is not None:
                self.control.abort()  # tells the peer

    # ---- Steps of opening

    def start(self, control: ControlChannel) -> None:
        """Take over the control channel and begin to watch the peer. Call when the handshake is complete."""
        assert self.peer is not None
        label = f"with {format_address(control.address('peername'))} ({self.peer.device})"
        self.channel.label = self._lifecycle.label = label
        self.control = control
        self.liveness.watch(control)
        self.liveness.start()

    # ---- Steps of closing, which the lifecycle calls

    def stop(self) -> None:
        """Stop watching the peer, and close the message channel. This is the first step of closing."""
        self.liveness.stop()
        self.channel.close()

    async def drain(self) -> None:
        """Close the control channel, and wait a limited time for the peer to close its end.

        The lifecycle calls this after it has closed the queue pair.

        :raises VerbsError: with rdma_cm: a verb failed.
        """
        if self.control is not None:
            try:
                await self.control.aclose()
            finally:
                self.control.abort()

    def drain_now(self) -> bool:
        """Do what `drain` does without waiting for the peer.

        :returns: False if `drain` still has to be awaited.
        """
        return self.control is None or self.control.abort()

    def abandon(self) -> None:
        """Notify the peer at once, in any thread, if that needs no event loop: see `ControlChannel.abandon`."""
        if self.control is not None:
            self.control.abandon()

    def destroy(self) -> None:
        """Return the buffers to the pool that connections share, and call the callback set with `on_closed`."""
        self._block.release()
        if self.announcer is not None:
            self.announcer.drop_copies()
        if self.closed_callback is not None:
            self.closed_callback()
