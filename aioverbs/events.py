"""Asynchronous events of a device, for who wants to hear of them."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from aioverbs._core import engine
from aioverbs.errors import VerbsError
from aioverbs.resource import Resource
from aioverbs.types import EventType

__all__ = ["DeviceEvent", "EventPump"]


@dataclass(frozen=True)
class DeviceEvent:
    """Something that happened to a device, a port of it, or an object: ``ibv_get_async_event``, acknowledged.

    :param event_type: what happened.
    :param resource: the queue pair, completion queue or shared receive queue that it happened to; None for those of the
        device and of ports, and where nobody has the object any more.
    :param port_num: the port that it happened to, or None.
    """

    event_type: EventType
    resource: Resource | None
    port_num: int | None


class _Listener:
    """Who waits in one loop, for events of everything or of one object."""

    def __init__(self, resource: Resource | None) -> None:
        self.resource = resource
        self.loop = asyncio.get_running_loop()
        self._events: deque[DeviceEvent | None] = deque()
        self._news = asyncio.Event()

    def tell(self, event: DeviceEvent | None) -> None:
        """From any thread; None: there are no more."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: DeviceEvent | None) -> None:
        self._events.append(event)
        self._news.set()

    async def next(self) -> DeviceEvent | None:
        while not self._events:
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()


class EventPump:
    """Takes the events of a context while somebody listens, on the loops of those who do, and tells all of them.

    Whichever loop is woken first takes what there is: the others find nothing, and are told by it.

    :param find: the user's object for a handle.
    """

    def __init__(self, context: engine.Context, find: Callable[[engine.Handle], Resource | None]) -> None:
        self._context = context
        self._find = find
        # Replaced, never changed: read by all threads, replaced under the lock.
        self._listeners: tuple[_Listener, ...] = ()
        self._lock = threading.Lock()

    async def listen(self, resource: Resource | None = None) -> AsyncIterator[DeviceEvent]:
        """Events from here on, of everything or of one object, until the pump is stopped."""
        listener = _Listener(resource)
        with self._lock:
            self._listeners += (listener,)
        listener.loop.add_reader(self._context.async_fd, self._readable)  # once for each loop: it replaces
        try:
            while (event := await listener.next()) is not None:
                yield event
        finally:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)
            if all(other.loop is not listener.loop for other in self._listeners):
                listener.loop.remove_reader(self._context.async_fd)

    def stop(self) -> None:
        """There are no more events: the device is about to be closed."""
        for listener in self._listeners:
            listener.tell(None)

    def _readable(self) -> None:
        try:
            while (taken := self._context.get_async_event()) is not None:
                event = DeviceEvent(
                    taken.event_type, self._find(taken.element) if taken.element is not None else None, taken.port_num
                )
                taken.ack()
                for listener in self._listeners:
                    if listener.resource is None or listener.resource is event.resource:
                        listener.tell(event)
        except VerbsError:
            self.stop()
