"""Listeners: receive connection requests from peers."""

import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Self

from aioverbs._core.handles import rdma_cm as core
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._lifecycle.resource import HandleResource, lifecycle_of, open_part_now, suppress_warning
from aioverbs.addresses import Address, check_socket_port, format_address
from aioverbs.errors import ClosedResourceError
from aioverbs.rdma_cm.cm_id import Identifier, look_up
from aioverbs.rdma_cm.events import CmEventType, EventChannel
from aioverbs.rdma_cm.state_machine import error_for_event

__all__ = ["Listener"]


class _ConnectRequests:
    """Connection requests waiting at a listener.

    The lifecycle refers to this object instead of the user's `Listener`, so that an unused listener can be garbage
    collected.

    :param handle: handle of the listener's rdma_cm_id.
    :param channel: the open channel.
    :param lifecycle: lifecycle of the listener.
    """

    def __init__(self, handle: core.Identifier, channel: EventChannel, lifecycle: Lifecycle) -> None:
        self._handle = handle
        self._channel = weakref.ref(channel)
        self._dispatcher = channel._dispatcher
        self._lifecycle = lifecycle
        self._condition = lifecycle.condition()
        self._pending: deque[Identifier] = deque()  # at most `backlog`: the kernel counts them
        self._failure: Exception | None = None
        self.closed = False
        self._dispatcher.receivers[handle] = self

    def on_event(self, event: core.Event) -> None:
        """Handle an event of the listener: a connection request, or the removal of the device; ignore other events.

        This is called on the channel's event loop.
        """
        if event.event_type == CmEventType.CONNECT_REQUEST:
            self._add_request(event)
        elif event.event_type == CmEventType.DEVICE_REMOVAL:
            self.fail(error_for_event("the listener", event))

    def _add_request(self, event: core.Event) -> None:
        """Make an open `Identifier` for a connection request, and queue it for `next_identifier`.

        If the listener or the channel is closed or is being closed, destroy the request instead.
        """
        assert event.identifier is not None
        channel = self._channel()
        if channel is None or self.closed:
            event.identifier.destroy()
            return
        identifier = Identifier(channel, event)
        lifecycle_of(identifier).inherit_site(self._lifecycle)
        try:
            open_part_now(identifier)  # the caller cannot have closed it: it was not returned yet
        except ClosedResourceError:  # the channel is being closed
            event.identifier.destroy()
            return
        self._pending.append(identifier)
        self._condition.notify()

    def fail(self, error: Exception) -> None:
        """Record that no more requests will arrive, and wake the caller of `next_identifier`.

        :param error: exception that `next_identifier` raises once it has returned all pending requests.
        """
        self._failure = error
        self._condition.notify()

    def disconnect(self) -> None:
        """Do nothing, because pending requests are not connected yet."""

    async def next_identifier(self) -> Identifier:
        """Wait for the next connection request.

        :returns: an open identifier for the request, to be closed by the caller.
        :raises StopAsyncIteration: the listener was closed.
        :raises DeviceRemovedError: the device was removed, and no request is pending.
        :raises VerbsError: reading events from the channel failed, and no request is pending.
        """
        await self._condition.wait_while(lambda: not (self._pending or self._failure or self.closed))
        if self.closed:
            raise StopAsyncIteration
        if not self._pending:
            assert self._failure is not None
            raise self._failure
        identifier = self._pending.popleft()
        suppress_warning(identifier, False)
        return identifier

    async def drain(self) -> None:
        """Stop accepting requests, and reject all pending ones: those that `next_identifier` has not returned.

        Closing the listener awaits this first.

        :raises VerbsError: the identifier of a pending request cannot be closed; later requests are still pending.
        """
        self.closed = True
        self._condition.notify()
        while self._pending:
            await self._pending.popleft().aclose()

    def drain_now(self) -> bool:
        """Stop accepting requests, and return whether no request is pending. `drain` rejects pending ones."""
        self.closed = True
        self._condition.notify()
        return not self._pending

    def destroy(self) -> None:
        """Stop receiving events, before the lifecycle destroys the listener's rdma_cm_id."""
        self.closed = True
        self._dispatcher.receivers.pop(self._handle, None)


class Listener(HandleResource[core.Identifier]):
    """Listener for connection requests: ``rdma_bind_addr`` and ``rdma_listen``. Made by `Channel.listener`.

    ``async for`` yields an open `Identifier` for each connection request. The caller accepts or rejects the request
    with `Identifier.accept` or `Identifier.reject`, and must close the identifier in either case. Closing the listener
    ends the iteration, rejects requests that were not yielded, and leaves the yielded identifiers open.

    The iteration raises `DeviceRemovedError` if the device of the address is removed, `VerbsError` if reading events
    from the channel fails, `AffinityError` if another event loop owns the channel, and `ClosedResourceError` if the
    listener was never opened.

    Opening raises `VerbsError` with EADDRINUSE or EADDRNOTAVAIL, or with ENODEV if no RDMA device has the address.
    `Listener.open` lists further exceptions.
    """

    _requests: _ConnectRequests | None = None

    def __init__(self, channel: EventChannel, host: str | None, port: int, backlog: int) -> None:
        if backlog < 1:
            raise ValueError(f"`backlog` must be 1 or more, got {backlog}")
        check_socket_port(port)
        super().__init__(channel)
        self._channel = channel
        self._host = host
        self._port = port
        self._backlog = backlog
        self._bind_address: Address = ("0.0.0.0", port)

    def _owner(self) -> Affinity | None:
        """Return the owner of the channel, the `Affinity` of the event loop that opened the channel."""
        return self._channel.owner

    async def open(self) -> Self:
        """Resolve the host and start listening for connection requests.

        If this fails or is cancelled, the listener stays unopened.

        :returns: the listener itself, to be closed by the caller.
        :raises OSError: the host name cannot be resolved.
        :raises ValueError: the host cannot be a host name, for example because a label of it is too long.
        :raises VerbsError: with EADDRINUSE if the address is in use, with EADDRNOTAVAIL if this machine does not have
            it, with ENODEV if no RDMA device has it.
        :raises ClosedResourceError: the channel is closed, or the listener was opened before.
        :raises AffinityError: another event loop owns the channel.
        """
        if self._host is not None:
            self._bind_address = await look_up(self._host, self._port)
        return await super().open()

    def _open(self) -> None:
        """Bind to the address and start listening: ``rdma_bind_addr`` and ``rdma_listen``.

        :raises VerbsError: with EADDRINUSE if the address is in use, with EADDRNOTAVAIL if this machine does not have
            it, with ENODEV if no RDMA device has it.
        """
        self._handle = core.Identifier(self._channel.handle)
        self._lifecycle.hold(self._handle)
        self._handle.bind_addr(self._bind_address)
        self._requests = _ConnectRequests(self._handle, self._channel, self._lifecycle)
        self._lifecycle.hold(self._requests)
        self._lifecycle.drain, self._lifecycle.drain_now = self._requests.drain, self._requests.drain_now
        self._handle.listen(self._backlog)
        self._lifecycle.label = f"at {format_address(self._handle.local_address)}"

    @property
    def address(self) -> Address:
        """Address on which the listener listens: a tuple that begins with host and port.

        :raises ClosedResourceError: the listener is not open.
        """
        address = self.handle.local_address
        assert address is not None
        return address

    def __aiter__(self) -> AsyncIterator[Identifier]:
        return self

    async def __anext__(self) -> Identifier:
        if self._requests is None:
            self._check_open()
        assert self._requests is not None
        owner = self._lifecycle.owner
        if owner is not None and not self._requests.closed:
            owner.check(self._lifecycle, "__anext__")
        return await self._requests.next_identifier()
