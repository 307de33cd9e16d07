"""Establishing a connection over a control channel: the handshake, and the steps of the queue pair that go with it."""

import contextlib
import errno
from dataclasses import dataclass

from aioverbs._connection.connection import Connection, end_of
from aioverbs._connection.connection_end import ConnectionEnd
from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.handshake import Capabilities, Handshake, Offer, Reason, encode_reject
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._connection.settings import ConnectionSettings
from aioverbs._connection.shared_queues import lease_block
from aioverbs._connection.spare_ends import open_end, take_spare_end
from aioverbs._lifecycle.turns import OPENING, take_turn
from aioverbs._proofs import make_nonce
from aioverbs._verbs.base_domain import Domain
from aioverbs._verbs.capability_checks import has_windows
from aioverbs._verbs.endpoint import Endpoint
from aioverbs._verbs.qp_modify import establish_cancellable, is_modify_pending
from aioverbs._verbs.queue_pair import QueuePair
from aioverbs.errors import (
    BrokenResourceError,
    HandshakeError,
    QueuePairStateError,
    TransitionError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.types import AtomicCap, QpState

__all__ = ["Progress", "establish"]

# Errors of ibv_modify_qp with which every further attempt would fail, too. All others may go away, such as an
# interrupted path to the peer, a shortage, or a device that is being removed and comes back.
_PERMANENT_ERRNOS = {errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


@dataclass
class Progress:
    """Progress of an attempt to connect.

    :param waiting_for: description of the step that has not succeeded yet, for the message of a timeout.
    """

    waiting_for: str = ""


async def establish(
    control: ControlChannel,
    domain: Domain,
    secret: bytes | None,
    settings: ConnectionSettings,
    progress: Progress | None = None,
    *,
    initiator: bool,
) -> Connection:
    """Perform one end's part of the handshake and connect the queue pair to the peer's.

    The messages of `Handshake` go over the control channel. On failure or cancellation, the control channel is closed
    and the connection is aborted. If aborting has to wait for a verb in a thread, a background task aborts the
    connection and this call does not wait. There is no time limit: the caller sets one.

    :param control: open channel to the peer; from now on, closing the connection closes the channel.
    :param domain: domain that the queue pair is created on.
    :param secret: the shared secret; None for no secret.
    :param settings: sizes and times of this end.
    :param progress: receives the description of a step that does not end, for the message of a timeout; None if the
        caller does not need it.
    :param initiator: whether this end requested the connection.
    :returns: the open connection, to be closed by the caller.
    :raises HandshakeError: one end refuses the other. If this end refuses, it has sent REJECT to the peer.
    :raises BrokenResourceError: the peer is gone.
    :raises ConnectionRejectedError: with rdma_cm: the peer rejected the connection or has no listener.
    :raises UnreachableError: with rdma_cm: the peer does not answer.
    :raises VerbsError: the device has no queue pair, completion queue or memory region left, or another verb failed.
    :raises OSError: the process cannot map the memory for the buffers, or has no file descriptor left.
    :raises MemoryError: no memory is left for the buffers.
    :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or the
        domain cannot use ``spin_ns``.
    :raises ClosedResourceError: the domain is not open, or was closed during the handshake.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    handshake = Handshake(initiator, make_nonce(), secret)
    pending = _PendingConnection(domain, settings, takes_spare=not initiator)
    try:
        await control.begin(lambda: pending.prepare(control), initiator, settings.repetitions(software=False))
        if initiator:
            await _initiate(handshake, control, pending)
        else:
            await _answer(handshake, control, pending)
        return pending.finish(control)
    except BaseException as error:
        try:  # with rdma_cm, a peer can make this end wait for the acknowledgement of REJECT, until it is cancelled
            if isinstance(error, HandshakeError) and not error.by_peer:
                with contextlib.suppress(OSError, BrokenResourceError, QueuePairStateError, WorkCompletionError):
                    await control.send(encode_reject(error))
        finally:
            try:
                if not await pending.abort() and progress is not None:
                    progress.waiting_for = "the device did not resolve the peer's link-layer address"
            finally:
                if isinstance(error, Exception) or not control.abort():
                    await control.aclose()
        raise


class _PendingConnection:
    """Connection during its handshake.

    :param domain: domain that the queue pair is created on.
    :param settings: sizes and times of this end.
    :param takes_spare: whether to use the end that listeners keep ready.
    """

    def __init__(self, domain: Domain, settings: ConnectionSettings, takes_spare: bool) -> None:
        self._domain = domain
        self._settings = settings
        self._takes_spare = takes_spare
        self._opened: tuple[Connection, ConnectionEnd] | None = None
        self._offer: Offer | None = None

    async def _open(self) -> ConnectionEnd:
        """Create the queue pair, or take one that is ready, unless an earlier call has done so.

        :returns: this end of the connection.
        :raises VerbsError: the device has no queue pair, completion queue or memory region left.
        :raises OSError: the process cannot map the memory for the buffers, or has no file descriptor left.
        :raises MemoryError: no memory is left for the buffers.
        :raises ValueError: the device has no such port or GID, or does not support the queue depths of the settings; or
            the domain cannot use ``spin_ns``.
        :raises ClosedResourceError: the domain is not open.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        """
        if self._opened is None:
            connection = take_spare_end(self._domain, self._settings) if self._takes_spare else None
            if connection is None:
                await take_turn(OPENING)  # so that handshakes go on while many connections are made
                block = await lease_block(self._domain, self._settings)
                connection = open_end(self._domain, self._settings, block)
            self._opened = connection, end_of(connection)
        return self._opened[1]

    async def offer(self) -> Offer:
        """Return the offer that describes this end to the peer; each call returns the same one.

        :raises HandshakeError: the port has no GID at the moment.
        :raises Exception: any other exception that `_open` raises.
        """
        end = await self._open()
        if self._offer is None:
            self._offer = _make_offer(end.qp, self._settings)
        return self._offer

    async def prepare(self, control: ControlChannel) -> MessageChannel:
        """Prepare the queue pair for a control channel that connects it before the handshake: see
        `ControlChannel.begin`.

        The messages of the handshake are sent over the queue pairs, so the receives are posted first. The peer is
        watched from now on, so that the handshake gets an exception if the peer or the device is lost.

        :raises Exception: whatever `offer` raises.
        """
        await self.offer()  # before the peer is contacted, as the port may have no GID
        end = await self.post_receives()
        end.liveness.watch(control)
        return end.channel

    async def post_receives(self) -> ConnectionEnd:
        """Post the receives of the queue pair, unless an earlier call has done so. Its peer need not wait for that.

        :returns: this end of the connection.
        :raises Exception: whatever `_open` raises.
        """
        end = await self._open()
        end.post_receives()
        return end

    async def connect(self, peer: Offer, handshake_messages: int) -> None:
        """Connect the queue pair to the peer's, unless rdma_cm has already done so. Messages may then arrive.

        :param peer: the peer's offer.
        :param handshake_messages: number of handshake messages that the peer has yet to send.
        :raises HandshakeError: the queue pair cannot be connected. The reason is TEMPORARY if another attempt may
            succeed, else DEVICE.
        :raises ClosedResourceError: the queue pair was closed during the call.
        :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
        :raises VerbsError: connecting failed with a permanent error, and then the device could not be queried.
        """
        end = await self.post_receives()
        qp, own = end.qp, await self.offer()
        is_connected = qp.qp_state is QpState.RTS  # with rdma_cm: the handshake goes over the queue pair
        end.begin_messages(own, peer, handshake_messages if is_connected else 0)
        if is_connected:
            return
        here = own.endpoint
        try:
            attributes = self._settings.repetitions(software=qp.handle.context.software)
            attributes["av"] = here.path_to(peer.endpoint, port_num=self._settings.port, sgid_index=qp.gid_index)
            await establish_cancellable(qp, peer.endpoint, attributes)
        except (BrokenResourceError, TransitionError, ValueError, VerbsError) as error:
            is_temporary = isinstance(error, BrokenResourceError) or (
                isinstance(error, VerbsError) and error.errno not in _PERMANENT_ERRNOS
            )
            if not is_temporary:
                _endpoint(qp)  # if the GID is gone, the kernel reports EINVAL: then raise TEMPORARY
            raise HandshakeError(Reason.TEMPORARY if is_temporary else Reason.DEVICE, str(error)) from error

    def finish(self, control: ControlChannel) -> Connection:
        """Start monitoring the peer, and return the connection. Call when the handshake is complete."""
        assert self._opened is not None
        connection, end = self._opened
        end.start(control)
        return connection

    async def abort(self) -> bool:
        """Close the connection, if it was opened. The control channel stays open.

        :returns: False if closing has to wait for a verb in a thread, which may take a long time; a background task
            then closes the connection, and this call does not wait.
        :raises Exception: whatever `Connection.aclose` raises.
        """
        if self._opened is None:
            return True
        connection, end = self._opened
        connection.abort()
        if is_modify_pending(end.qp):
            return False
        await connection.aclose()
        return True


async def _initiate(handshake: Handshake, control: ControlChannel, pending: _PendingConnection) -> None:
    """Exchange the messages of the handshake as the initiator, and connect the queue pair.

    :raises Exception: whatever `establish` raises.
    """
    if handshake.is_short:
        ours = await pending.offer()
        await control.send(handshake.hello(), handshake.offer(ours))
        await pending.post_receives()  # while the peer does its part
        handshake.receive_hello(await control.receive())
    else:
        await control.send(handshake.hello())
        handshake.receive_hello(await control.receive())
        await control.send(handshake.offer(await pending.offer()))
    await pending.connect(handshake.receive_offer(await control.receive()), 0)
    await control.send(handshake.ready())


async def _answer(handshake: Handshake, control: ControlChannel, pending: _PendingConnection) -> None:
    """Exchange the messages of the handshake as the listener, and connect the queue pair.

    :raises Exception: whatever `establish` raises.
    """
    handshake.receive_hello(await control.receive())
    hello = handshake.hello()
    if not handshake.is_short:
        await control.send(hello)
    peer = handshake.receive_offer(await control.receive())
    ours = await pending.offer()
    await pending.connect(peer, 1)
    offer = handshake.offer(ours)
    await (control.send(hello, offer) if handshake.is_short else control.send(offer))
    handshake.receive_ready(await control.receive())


def _make_offer(qp: QueuePair, settings: ConnectionSettings) -> Offer:
    """Return a new offer that describes this end to the peer.

    :raises HandshakeError: the port has no GID at the moment.
    :raises VerbsError: the device or the port cannot be queried.
    :raises ClosedResourceError: the queue pair is closed.
    """
    context = qp.handle.context
    atomics = context.attributes.atomic_cap
    capabilities = 0
    if atomics is not AtomicCap.NONE:
        capabilities |= int(Capabilities.ATOMICS)
    if has_windows(context.attributes):
        capabilities |= int(Capabilities.WINDOWS)
    if context.attributes.max_qp_rd_atom and context.attributes.max_qp_init_rd_atom:
        capabilities |= int(Capabilities.ANNOUNCES)
    return Offer(
        _endpoint(qp),
        settings.buffer_size,
        settings.receive_depth,
        settings.max_message,
        Capabilities(capabilities),
        atomics,
        context.name,
    )


def _endpoint(qp: QueuePair) -> Endpoint:
    """Return the endpoint of the queue pair, to be sent to the peer.

    :raises HandshakeError: the port has no GID at the moment; the reason is TEMPORARY.
    :raises VerbsError: the device or the port cannot be queried.
    :raises ClosedResourceError: the queue pair is closed.
    """
    try:
        return qp.local_endpoint()
    except ValueError as error:  # A port loses its GID with its address, and may get both back.
        raise HandshakeError(Reason.TEMPORARY, str(error)) from error
