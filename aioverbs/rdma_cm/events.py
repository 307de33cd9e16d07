"""Events of librdmacm: the channel's event loop reads them and passes each to the identifier or listener concerned."""

import enum
from pathlib import Path
from typing import Protocol

from aioverbs._core.handles import rdma_cm as core
from aioverbs._lifecycle.affinity import Affinity, ThreadModel, owner_for, running_loop
from aioverbs._lifecycle.resource import HandleResource
from aioverbs._providers.sysfs import check_node
from aioverbs.errors import ForkedProcessError, VerbsError

__all__ = ["CmEventType", "Dispatcher", "EventChannel", "EventReceiver"]

_CM_NODE = Path("/dev/infiniband/rdma_cm")
_EVENTS_PER_ITERATION = 64  # events read in one iteration of the loop


class CmEventType(enum.IntEnum):
    """Types of librdmacm events: ``RDMA_CM_EVENT_*``."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


class EventReceiver(Protocol):
    """Receiver of an rdma_cm_id's events: a `CmStateMachine`, or the pending requests of a listener."""

    def on_event(self, event: core.Event) -> None:
        """Handle an event of this receiver's rdma_cm_id. This is called on the channel's event loop."""

    def fail(self, error: Exception) -> None:
        """Handle a failure of the channel, which will deliver no more events.

        :param error: exception that describes the failure.
        """

    def disconnect(self) -> None:
        """Start disconnecting from the peer, without waiting, because the channel is about to be closed."""


class Dispatcher:
    """Dispatcher of a channel's events: reads them on the loop that opens the channel, and passes each to its receiver.

    The dispatcher holds no references to the user's objects, so that unused ones can be garbage collected.

    :param channel: handle of the channel.
    :raises RuntimeError: no asyncio event loop is running.
    """

    def __init__(self, channel: core.EventChannel) -> None:
        self._channel = channel
        self.loop = running_loop()
        self.receivers: dict[core.Identifier, EventReceiver] = {}
        self._fd = channel.fd
        self.loop.add_reader(self._fd, self._readable)

    def destroy(self) -> None:
        """Stop reading events from the channel. Do nothing if the loop that reads them is closed."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._fd)

    def disconnect_all(self) -> None:
        """Start disconnecting all connections of the channel, so that closing waits for all peers at the same time."""
        for each in tuple(self.receivers.values()):
            each.disconnect()

    def _readable(self) -> None:
        """Read events, at most 64 in one iteration of the loop, and pass each to its receiver.

        If reading fails, stop reading and pass the `VerbsError` to all receivers. A connection request whose listener
        no longer exists is destroyed. In a forked child, nothing is read. No exception is raised.
        """
        for _ in range(_EVENTS_PER_ITERATION):
            try:
                event = self._channel.take_event()
            except ForkedProcessError:  # a forked child that runs the parent's loop must not read the parent's events
                return
            except VerbsError as error:
                self.loop.remove_reader(self._fd)
                for each in tuple(self.receivers.values()):
                    each.fail(error)
                return
            if event is None:
                return
            is_request = event.event_type == CmEventType.CONNECT_REQUEST
            target = event.listener if is_request else event.identifier
            receiver = self.receivers.get(target) if target is not None else None
            if receiver is not None:
                receiver.on_event(event)
            elif is_request and event.identifier is not None:
                event.identifier.destroy()


class EventChannel(HandleResource[core.EventChannel]):
    """Base class of `Channel`, with the parts that identifiers and listeners use."""

    _dispatcher: Dispatcher  # set by `_open`

    def _owner(self) -> Affinity | None:
        """Return a new `Affinity` for the running event loop and its thread, which will own the channel.

        :raises RuntimeError: no asyncio event loop is running.
        """
        return owner_for(ThreadModel.SINGLE)

    def _open(self) -> None:
        """Create the channel and start reading its events on the running event loop.

        :raises LibraryNotFoundError: librdmacm is not installed.
        :raises VerbsError: the kernel module rdma_ucm is not loaded, or the process may not use it.
        """
        try:
            self._handle = core.EventChannel(self._lifecycle.owner)
        except VerbsError as error:
            check_node(error.verb, _CM_NODE)
            raise
        self._lifecycle.hold(self._handle)
        self._dispatcher = Dispatcher(self._handle)
        self._lifecycle.hold(self._dispatcher)
        self._lifecycle.stop = self._dispatcher.disconnect_all
