"""Events of librdmacm, taken by a channel's loop and told to whom they are about."""

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
_EVENTS_PER_ITERATION = 64  # events that are taken in one turn of the loop


class CmEventType(enum.IntEnum):
    """What librdmacm tells: ``RDMA_CM_EVENT_*``."""

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
    """Who is told of the events of an identifier."""

    def on_event(self, event: core.Event) -> None:
        """On the channel's loop."""

    def fail(self, error: Exception) -> None:
        """There will be no more events."""

    def disconnect(self) -> None:
        """The channel is about to be closed."""


class Dispatcher:
    """Takes the events of a channel on the loop that opens it, and tells whom they are about.

    It knows no user's object, so that those can be forgotten.
    """

    def __init__(self, channel: core.EventChannel) -> None:
        self._channel = channel
        self.loop = running_loop()
        self.receivers: dict[core.Identifier, EventReceiver] = {}
        self._fd = channel.fd
        self.loop.add_reader(self._fd, self._readable)

    def destroy(self) -> None:
        """Hear no more."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._fd)

    def disconnect_all(self) -> None:
        """Say goodbye to all peers at once, so that none has to be waited for by itself."""
        for each in tuple(self.receivers.values()):
            each.disconnect()

    def _readable(self) -> None:
        for _ in range(_EVENTS_PER_ITERATION):
            try:
                event = self._channel.take_event()
            except ForkedProcessError:  # the parent's loop runs on in a child: these are the parent's events
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
    """What a `Channel` is for its identifiers."""

    _dispatcher: Dispatcher  # from its opening on

    def _owner(self) -> Affinity | None:
        return owner_for(ThreadModel.SINGLE)

    def _open(self) -> None:
        try:
            self._handle = core.EventChannel(self._lifecycle.owner)
        except VerbsError as error:
            check_node(error.verb, _CM_NODE)
            raise
        self._lifecycle.hold(self._handle)
        self._dispatcher = Dispatcher(self._handle)
        self._lifecycle.hold(self._dispatcher)
        self._lifecycle.stop = self._dispatcher.disconnect_all
