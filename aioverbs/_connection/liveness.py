"""Liveness of a connection's peer: keep-alive probes, and what follows when the peer or the device is lost."""

import asyncio
import contextlib
from contextvars import Context

from aioverbs._connection.control_channel import ControlChannel
from aioverbs._connection.message_channel import MessageChannel
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._verbs.base_domain import Domain, shared_resources_of
from aioverbs._verbs.queue_pair import qp_work_state_of
from aioverbs.errors import (
    AffinityError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceRemovedError,
)

__all__ = ["Liveness", "Ticker"]

_TICKS_PER_TURN = 64
_QUIET = 64  # requests and receives, at most, from one tick to the next, of a connection that gives its pages back
_LINGER_S = 0.02  # completions may still arrive after the report that the peer is gone


class Ticker:
    """Timer that the connections of an event loop with the same keep-alive time share.

    :param tick_s: interval in seconds.
    """

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._loop = running_loop()
        self._members: set[Liveness] = set()
        self._due: list[Liveness] = []  # those that the current tick has not reached yet
        self._timer: asyncio.Handle | None = None
        self._context = Context()  # not that of the task which opened the first connection, and may be long gone

    def add(self, member: "Liveness") -> None:
        """Call ``tick`` of a member at each interval."""
        self._members.add(member)
        if self._timer is None:
            self._start()

    def discard(self, member: "Liveness") -> None:
        """Undo `add`. Without members, the timer does not run."""
        self._members.discard(member)
        if self._members:
            return
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._due = list(self._members)
        self._go_on()

    def _go_on(self) -> None:
        """Call the next members, few in each turn of the loop, and restart the timer after the last one."""
        try:
            for _ in range(_TICKS_PER_TURN):
                if not self._due:  # a call may be the one that removes the last member
                    break
                self._due.pop().tick()
        finally:
            if self._due:
                self._timer = self._loop.call_soon(self._go_on, context=self._context)
            elif self._members:
                self._start()
            else:
                self._timer = None

    def _start(self) -> None:
        """Start the timer of the next interval."""
        self._timer = self._loop.call_later(self._tick_s, self._tick, context=self._context)


def _ticker_of(domain: Domain, tick_s: float) -> Ticker:
    """Return the ticker of the running loop for connections on a domain."""
    key = "keep-alive", running_loop(), tick_s
    found = shared_resources_of(domain).get(key)
    if found is None:
        found = shared_resources_of(domain)[key] = Ticker(tick_s)
    assert isinstance(found, Ticker)
    return found


class Liveness:
    """Watch over the peer of a connection, which fails the message channel when the peer is lost.

    :param channel: message channel of the connection.
    :param domain: domain of the connection.
    :param keep_alive_s: time in seconds after which a silent peer counts as lost; None for no limit.
    """

    __slots__ = (
        "_channel",
        "_control",
        "_domain",
        "_has_pages",
        "_is_probing",
        "_keep_alive_s",
        "_last_completed",
        "_ticker",
    )

    def __init__(self, channel: MessageChannel, domain: Domain, keep_alive_s: float | None) -> None:
        self._channel = channel
        self._domain = domain
        self._keep_alive_s = keep_alive_s
        self._control: ControlChannel | None = None
        self._ticker: Ticker | None = None
        self._last_completed = -1
        self._is_probing = False  # whether the last tick has sent a probe
        self._has_pages = False  # whether any request or receive has completed since pages were given back

    def watch(self, control: ControlChannel) -> None:
        """Watch the control channel from now on: if it reports the loss of the peer or the device, fail the channel."""
        self._control = control
        control.watch(self._on_lost)

    def start(self) -> None:
        """Send probes to the peer's device from now on, while the connection is idle."""
        if self._keep_alive_s is not None:
            self._ticker = _ticker_of(self._domain, self._keep_alive_s / 4)
            self._ticker.add(self)

    def stop(self) -> None:
        """Stop probing and watching."""
        self._stop_probing()
        if self._control is not None:
            self._control.unwatch()

    def _stop_probing(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.discard(self)

    def tick(self) -> None:
        """Probe the peer's device if no request or receive has completed since the last tick. If few have, give back
        the pages of buffers.

        If the channel is broken or closed, stop probing. If the peer is gone, the probe fails within the time limit of
        the queue pair, and the connection breaks.
        """
        channel = self._channel
        if channel.broken is not None or channel.closed:
            self._stop_probing()
            return
        work = qp_work_state_of(channel.qp)
        assert work is not None
        assert work.send_queue is not None
        completed = channel.receive_queue.completed + work.send_queue.completed
        self._give_back_pages(completed - self._last_completed - self._is_probing)  # before a probe, which needs some
        self._is_probing = completed == self._last_completed and channel.sender.send_keepalive()
        self._last_completed = completed

    def _give_back_pages(self, completed: int) -> None:
        """Give the pages back that the connection has used, if few requests and receives have completed since the last
        tick.

        :param completed: number of those, without that of a probe.
        """
        self._has_pages |= completed > 0
        if self._has_pages and completed <= _QUIET:
            # If another thread is inside a verb, the next tick does it; all other ends are reported elsewhere.
            with contextlib.suppress(BusyResourceError, ConcurrentAccessError, AffinityError, ClosedResourceError):
                self._channel.give_back_pages()
                self._has_pages = False

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
            self._channel.loop.call_soon(self._on_lost, error)
        elif self._channel.eof_received or self._channel.discards:
            self._fail_lost(error)
        else:
            self._channel.loop.call_later(_LINGER_S, self._fail_lost, error)

    def _fail_lost(self, error: Exception) -> None:
        """Fail the message channel because of the exception `error`, unless the channel is closed.

        If another thread is inside a verb, do this in a later iteration of the event loop.
        """
        if self._channel.closed:
            return
        if not self._channel.poll():
            self._channel.loop.call_soon(self._fail_lost, error)
        elif self._channel.eof_received:
            self._channel.fail("the peer closed the connection")
        elif isinstance(error, DeviceRemovedError):
            self._channel.fail("the device was removed", error)
        else:
            self._channel.fail(f"the peer is gone: {error}", error)
