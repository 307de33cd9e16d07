"""Asynchronous events of a device, for who wants to hear of them."""

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ClassVar

from aioverbs._core import engine
from aioverbs.affinity import running_loop
from aioverbs.errors import VerbsError
from aioverbs.resource import Resource
from aioverbs.types import EventType

__all__ = ["DeviceEvent", "EventPump"]

_KEPT = 1024  # events that nobody heard of yet, at most; then the oldest are forgotten


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
        self.loop = running_loop()
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


class _Watcher:
    """Who is to be told in one loop that the device is lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lost: Callable[[], None]) -> None:
        self.loop = loop
        self._lost = lost

    def tell(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._lost)


class EventPump:
    """Takes the events of a context on the loops of those who listen or watch, and tells all of them.

    Whichever loop is woken first takes what there is: the others find nothing, and are told by it. There is one for
    each context: `EventPump.of`.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[engine.Context, "EventPump"]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, context: engine.Context) -> "EventPump":
        """The pump of a context. Who opens the context asks first, before any other thread knows it."""
        pump = cls._of.get(context)
        if pump is None:
            pump = cls._of[context] = cls(context)
        return pump

    def __init__(self, context: engine.Context) -> None:
        # Weakly, or no pump would ever go: what listens and watches keeps the context.
        self._context = weakref.ref(context)
        self._fd = context.async_fd
        self._lock = threading.Lock()
        # Both are replaced, never changed: read by all threads, replaced under the lock.
        self._listeners: tuple[_Listener, ...] = ()
        self._watchers: tuple[_Watcher, ...] = ()
        self._unheard: deque[DeviceEvent] = deque(maxlen=_KEPT)
        self.find: Callable[[engine.Handle], Resource | None] = lambda _: None  # the user's object for a handle

    async def listen(self, resource: Resource | None = None) -> AsyncIterator[DeviceEvent]:
        """Events of everything or of one object, from those on that nobody heard of, until the pump is stopped."""
        listener = _Listener(resource)
        with self._lock:
            self._listeners += (listener,)
        self._wake_in(listener.loop)
        while self._unheard:
            self._tell(self._unheard.popleft())
        try:
            while (event := await listener.next()) is not None:
                yield event
        finally:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)
            self._let_sleep(listener.loop)

    def watch(self, lost: Callable[[], None]) -> "_Watcher":
        """Have a function called on the running loop when the device is lost; until `unwatch` there."""
        watcher = _Watcher(running_loop(), lost)
        with self._lock:
            self._watchers += (watcher,)
        self._wake_in(watcher.loop)
        return watcher

    def unwatch(self, watcher: "_Watcher") -> None:
        """Do not. On the watcher's loop."""
        with self._lock:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)
        self._let_sleep(watcher.loop)

    def stop(self) -> None:
        """There are no more events: the device is about to be closed."""
        for listener in self._listeners:
            listener.tell(None)

    # ---- Loops that are woken by the descriptor

    def _wake_in(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._fd, self._readable)  # once for each loop: it replaces

    def _let_sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        loops = [listener.loop for listener in self._listeners] + [watcher.loop for watcher in self._watchers]
        if loop not in loops:
            loop.remove_reader(self._fd)

    def _readable(self) -> None:
        context = self._context()
        try:
            while context is not None and (taken := context.get_async_event()) is not None:
                found = self.find(taken.element) if taken.element is not None else None
                event = DeviceEvent(taken.event_type, found, taken.port_num)
                taken.ack()
                self._tell(event)
        except VerbsError:
            self.stop()

    def _tell(self, event: DeviceEvent) -> None:
        if event.event_type is EventType.DEVICE_FATAL:
            for watcher in self._watchers:
                watcher.tell()
        listeners = self._listeners
        if not listeners:
            self._unheard.append(event)
        for listener in listeners:
            if listener.resource is None or listener.resource is event.resource:
                listener.tell(event)
