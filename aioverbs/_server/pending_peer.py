"""Accepted peers, from their arrival to the end of their connections."""

import asyncio
import contextlib
import enum
import socket
from collections.abc import Callable

from aioverbs._connection.cm_control import CmControlChannel
from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.tcp_control import TcpControlChannel, accept_tcp
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._server.accept import AcceptSettings
from aioverbs.addresses import Address, format_address

__all__ = ["AcceptState", "PendingPeer"]


# Numbers of intervals, 0.1 s each, that a peer gets for each message of its handshake, or for all of it.
_SILENT_INTERVALS = 5
_UNSEEN_INTERVALS = 20


class AcceptState(enum.Enum):
    """States of an accepted peer."""

    HANDSHAKING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class PendingPeer:
    """An accepted peer from its arrival to the end of its connection, as the acceptor counts it.

    :param endpoint: the accepted socket or the rdma_cm request. A socket may be detached and passed to another loop.
    :param address: address of the peer.
    :param on_state_change: called after each change with this object, its previous state and, if the peer was refused,
        the reason.
    """

    __slots__ = (
        "_control",
        "_counted",
        "_loop",
        "_on_state_change",
        "address",
        "endpoint",
        "is_cancelled",
        "is_expiring",
        "silence",
        "state",
        "timeout",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        endpoint: CmControlChannel | socket.socket,
        address: Address | None,
        on_state_change: Callable[["PendingPeer", AcceptState, str], object],
    ) -> None:
        self.endpoint: CmControlChannel | socket.socket | None = endpoint
        self.address = address
        self.state = AcceptState.HANDSHAKING
        self.worker: int | None = None
        """Number of the pool's worker that handles the peer; None if no worker has been chosen."""
        self.timeout: asyncio.Timeout | None = None  # limit of the handshake
        self.is_expiring = False
        self.is_cancelled = False  # the task of the peer was cancelled
        self._loop = running_loop()
        self.silence = 0  # intervals since the last message, while other peers waited
        self._counted = 0  # messages of the peer when `silence` was last counted
        self._control: ControlChannel | None = None
        self._on_state_change = on_state_change

    @property
    def peer(self) -> str:
        """Address of the peer as text, such as ``10.0.0.1:7471``."""
        return format_address(self.address)

    async def open_control(self, accept_settings: AcceptSettings) -> ControlChannel:
        """Open the control channel to the peer. Call only once, and on the loop that accepted the peer.

        :param accept_settings: TLS context, and limit of the TLS handshake.
        :returns: the channel, to be closed by the caller.
        :raises OSError: the peer is gone, or the TLS handshake failed (`ssl.SSLError`) or took too long.
        :raises Exception: whatever `AcceptSettings.context` raises, if it was not used in this process before.
        """
        endpoint, self.endpoint = self.endpoint, None
        assert endpoint is not None
        if isinstance(endpoint, CmControlChannel):
            self._control = endpoint
            return endpoint
        self._control = await accept_tcp(endpoint, accept_settings.context, accept_settings.handshake_timeout_s)
        return self._control

    def count_silence(self) -> None:
        """Count one more interval in which the peer may have been silent, or begin anew if it has sent a message or
        waits for this end.

        The acceptor calls this at intervals of its loop. When the loop is late, that is one interval all the same, so
        that a peer is not taken for silent because this process is busy.
        """
        messages = self._messages()
        is_awaited = not isinstance(self._control, TcpControlChannel) or self._control.is_waiting
        self.silence = self.silence + 1 if is_awaited and messages == self._counted else 0
        self._counted = messages

    def _messages(self) -> int:
        """Return the number of messages of the handshake that the peer has sent, as far as they are seen here."""
        return self._control.messages if isinstance(self._control, TcpControlChannel) else 0

    @property
    def is_silent(self) -> bool:
        """Whether the peer has had its time for the next message of the handshake.

        The messages are not seen here if a worker handles the peer, or with rdma_cm: then the whole handshake counts.
        """
        is_seen = self.worker is None and not isinstance(self._control, CmControlChannel)
        limit = _SILENT_INTERVALS if is_seen else _UNSEEN_INTERVALS
        return self.silence >= limit and self._messages() == self._counted

    @property
    def has_sent(self) -> bool:
        """Whether the peer is known to have sent a message of the handshake."""
        return self._messages() > 0

    def abort(self) -> None:
        """Notify the peer at once that it is not, or no longer, connected, unless a worker handles the peer.

        The task of the peer has to be cancelled as well, to close its connection.
        """
        if self._control is not None:
            self._control.abort()
        elif isinstance(self.endpoint, socket.socket) and self.worker is None:
            self.endpoint.close()

    def expire(self) -> None:
        """Make the peer's handshake time out at once, because another peer needs its slot."""
        self.is_expiring = True
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(self._loop.time())

    def report_closed(self) -> None:
        """Report that the connection of the peer is closed: see `report_open`."""
        self.report_open(False)

    def report_open(self, is_open: bool) -> None:
        """Report that the peer has become a connection (True), or that its connection is closed (False).

        This can be called from any thread. Only the first report of each kind counts.
        """
        if asyncio._get_running_loop() is self._loop:
            self._set_open(is_open)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is counted any longer
                self._loop.call_soon_threadsafe(self._set_open, is_open)

    def _set_open(self, is_open: bool) -> None:
        """Set the state for `report_open`, on the loop that accepted the peer. Repeated reports have no effect."""
        if self.state is (AcceptState.HANDSHAKING if is_open else AcceptState.OPEN):
            if is_open and self.timeout is not None and not self.timeout.expired():
                self.timeout.reschedule(None)
            self._set_state(AcceptState.OPEN if is_open else AcceptState.CLOSED, "")

    def refuse(self, reason: str) -> None:
        """Report that the peer does not become a connection.

        This has no effect if the peer has already become a connection or was refused.

        :param reason: name under which the refusal is counted.
        """
        if self.state is AcceptState.HANDSHAKING:
            self._set_state(AcceptState.CLOSED, reason)

    def _set_state(self, state: AcceptState, reason: str) -> None:
        """Set the state, and call `on_state_change` with the previous state and the reason."""
        previous, self.state = self.state, state
        self._on_state_change(self, previous, reason)
