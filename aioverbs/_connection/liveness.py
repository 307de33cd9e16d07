"""Liveness of a connection's peer: keep-alive probes, and what follows when the peer or the device is lost."""

import asyncio

from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._verbs.queue_pair import qp_work_state_of
from aioverbs.errors import DeviceRemovedError

__all__ = ["Liveness"]

_LINGER_S = 0.02  # completions may still arrive after the report that the peer is gone


class Liveness:
    """Watch over the peer of a connection, which fails the message channel when the peer is lost.

    :param channel: message channel of the connection.
    :param keep_alive_s: time in seconds after which a silent peer counts as lost; None for no limit.
    """

    def __init__(self, channel: MessageChannel, keep_alive_s: float | None) -> None:
        self._channel = channel
        self._control: ControlChannel | None = None
        self._tick_s = keep_alive_s / 4 if keep_alive_s is not None else None
        self._loop = running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_completed = -1

    def watch(self, control: ControlChannel) -> None:
        """Watch the control channel from now on: if it reports the loss of the peer or the device, fail the channel."""
        self._control = control
        control.watch(self._on_lost)

    def start(self) -> None:
        """Send probes to the peer's device from now on, while the connection is idle."""
        if self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Stop probing and watching."""
        if self._timer is not None:
            self._timer.cancel()
        if self._control is not None:
            self._control.unwatch()

    def _tick(self) -> None:
        """Probe the peer's device if no send or receive has completed since the last tick, and restart the timer.

        If the channel is broken or closed, neither probe nor restart the timer. If the peer is gone, the probe fails
        within the time limit of the queue pair, and the connection breaks.
        """
        channel = self._channel
        if channel.broken is not None or channel.closed or self._tick_s is None:
            return
        work = qp_work_state_of(channel.qp)
        assert work is not None
        assert work.send_queue is not None
        completed = channel.receive_queue.completed + work.send_queue.completed
        if completed == self._last_completed:
            channel.sender.send_keepalive()
        self._last_completed = completed
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _on_lost(self, error: Exception) -> None:
        """Fail the connection because the peer or the device is gone, after receiving the peer's last messages.

        This does not wait. The connection fails 20 ms later; or immediately, if the peer has said that it sends no
        more, or this end is closing and waits only for the peer. If the channel is closed, nothing is done.

        :param error: exception that is the cause.
        """
        # The peer's last messages may already be in the completion queue, or arrive in a moment.
        if self._channel.closed:
            return
        if not self._channel.poll():
            self._loop.call_soon(self._on_lost, error)
        elif self._channel.eof_received or self._channel.discards:
            self._fail_lost(error)
        else:
            self._loop.call_later(_LINGER_S, self._fail_lost, error)

    def _fail_lost(self, error: Exception) -> None:
        """Fail the message channel because of the exception `error`, unless the channel is closed.

        If another thread is inside a verb, do this in a later iteration of the event loop.
        """
        if self._channel.closed:
            return
        if not self._channel.poll():
            self._loop.call_soon(self._fail_lost, error)
        elif self._channel.eof_received:
            self._channel.fail("the peer closed the connection")
        elif isinstance(error, DeviceRemovedError):
            self._channel.fail("the device was removed", error)
        else:
            self._channel.fail(f"the peer is gone: {error}", error)
