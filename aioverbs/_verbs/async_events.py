"""Asynchronous events of a device, for who wants to hear of them."""

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import CrossLoopCondition, OwnedIterator, running_loop
from aioverbs._lifecycle.resource import HandleResource, Resource, lifecycle_of
from aioverbs.errors import ClosedResourceError, ForkedProcessError, VerbsError
from aioverbs.types import EventType

__all__ = ["AsyncEventSource", "DeviceEvent", "EventPump"]

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


class _Unheard:
    """An event that nobody listened for. It keeps no object open that its user forgot."""

    def __init__(self, event: DeviceEvent) -> None:
        self._type = event.event_type
        self._resource = weakref.ref(event.resource) if event.resource is not None else None
        self._port_num = event.port_num

    def event(self) -> DeviceEvent:
        return DeviceEvent(self._type, self._resource() if self._resource is not None else None, self._port_num)


class _Listener:
    """Who waits in one loop, for events of everything or of one object."""

    def __init__(self, resource: Resource | None) -> None:
        self.loop = running_loop()
        self._resource = resource
        self._events: deque[DeviceEvent | None] = deque()
        self._condition = (
            lifecycle_of(resource).condition() if resource is not None else CrossLoopCondition()
        )  # that rings when it is closed

    def concerns(self, event: DeviceEvent) -> bool:
        return self._resource is None or self._resource is event.resource

    def tell(self, event: DeviceEvent | None) -> None:
        """From any thread; None: there are no more."""
        self._events.append(event)
        self._condition.notify()

    async def next(self) -> DeviceEvent | None:
        await self._condition.wait_while(lambda: not self._events and not self._is_over())
        return self._events.popleft() if self._events else None

    def _is_over(self) -> bool:
        return self._resource is not None and self._resource.closed


class _Watcher:
    """Who is to be told in one loop that something is broken: the device, or a completion queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, broken: Callable[[handles.Handle | None], None]) -> None:
        self.loop = loop
        self._broken = broken

    def tell(self, element: handles.Handle | None) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._broken, element)


class _Waker:
    """Wakes a loop, by a descriptor of its own: who closes the context, on whatever loop, closes none that is polled.

    A loop that polls what was closed misses what has the number next; libuv ends the process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, readable: Callable[[], None]) -> None:
        self._loop = loop
        self._forks = forks.count
        self._fd = os.dup(fd)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # a daemon thread's loop may poll it until the process ends
        loop.add_reader(self._fd, readable)

    def stop(self) -> None:
        """From any thread, once."""
        if asyncio._get_running_loop() is self._loop:
            self._stop()
            return
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # closed: it polls nothing
            self._close()

    def _stop(self) -> None:
        if self._forks != forks.count:  # what the kernel watches for a loop is one set for it and its copy in a child
            return
        self._loop.remove_reader(self._fd)
        self._close()


class EventPump:
    """Takes the events of a context on the loops of those who listen or watch, and tells all of them.

    Whichever loop is woken first takes what there is: the others find nothing, and are told by it. There is one for
    each context: `EventPump.of`.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[handles.Context, "EventPump"]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, context: handles.Context) -> "EventPump":
        """The pump of a context. Who opens the context asks first, before any other thread knows it."""
        pump = cls._of.get(context)
        if pump is None:
            pump = cls._of[context] = cls(context)
        return pump

    def __init__(self, context: handles.Context) -> None:
        # Weakly, or no pump would ever go: what listens and watches keeps the context.
        self._context = weakref.ref(context)
        self._forks = forks.count
        self._fd = context.async_fd
        self._lock = threading.Lock()
        self._wakers: dict[asyncio.AbstractEventLoop, _Waker] = {}  # each loop adds its own
        # Both are replaced, never changed: read by all threads, replaced under the lock.
        self._listeners: tuple[_Listener, ...] = ()
        self._watchers: tuple[_Watcher, ...] = ()
        self._unheard: deque[_Unheard] = deque(maxlen=_KEPT)  # under the lock
        self.find: Callable[[handles.Handle], object] = lambda _: None  # the user's object for a handle

    def listen(self, resource: Resource | None = None) -> AsyncGenerator[DeviceEvent, None]:
        """Events of everything, or of one object until it is closed, from those on that nobody heard of.

        Any event loop may begin to listen, and is the only one to go on with that.

        :raises AffinityError: another event loop began it; nothing was done.
        :raises ForkedProcessError: the context was opened before a fork, in the parent process.
        :raises OSError: there are no more descriptors.
        """
        name = f"events of {self._context() if resource is None else resource}"
        return OwnedIterator(name, self._listen(resource), lambda: None)

    async def _listen(self, resource: Resource | None) -> AsyncGenerator[DeviceEvent, None]:
        self._check_process()
        self._forget_closed_loops()
        listener = _Listener(resource)
        with self._lock:
            self._listeners += (listener,)
            unheard = tuple(self._unheard)
            self._unheard.clear()
            for kept in unheard:
                if listener.concerns(known := kept.event()):
                    listener.tell(known)
                else:
                    self._unheard.append(kept)
        try:
            self._wake(listener.loop)
            while (event := await listener.next()) is not None:
                yield event
                self._check_process()
        finally:
            if self._forks == forks.count:  # else who held the lock at the fork is not in this process
                with self._lock:
                    self._listeners = tuple(other for other in self._listeners if other is not listener)
                self._let_sleep_unheeded(listener.loop)

    def _check_process(self) -> None:
        if self._forks != forks.count:
            raise ForkedProcessError(f"{self._context() or 'its device'}")

    def watch(self, broken: Callable[[handles.Handle | None], None]) -> "_Watcher":
        """Have a function called on the running loop when the device is lost, or a completion queue of it broke, which
        raises no event for those who wait there; until `unwatch` there.

        :param broken: is told which completion queue, or None where it is the device.
        :raises OSError: there are no more descriptors.
        """
        watcher = _Watcher(running_loop(), broken)
        with self._lock:
            self._watchers += (watcher,)
        try:
            self._wake(watcher.loop)
        except BaseException:
            self.unwatch(watcher)
            raise
        return watcher

    def unwatch(self, watcher: "_Watcher") -> None:
        """Do not. On the watcher's loop."""
        with self._lock:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)
        self._let_sleep_unheeded(watcher.loop)

    async def drain(self) -> None:
        """The device is about to be closed."""
        self.stop()

    def stop(self) -> None:
        """There are no more events."""
        for listener in self._listeners:
            listener.tell(None)
        for loop in tuple(self._wakers):
            self._let_sleep(loop)

    # ---- Loops that are woken when there are events

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._wakers:
            self._wakers[loop] = _Waker(loop, self._fd, functools.partial(self._readable, loop))

    def _let_sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        waker = self._wakers.pop(loop, None)
        if waker is not None:
            waker.stop()

    def _let_sleep_unheeded(self, loop: asyncio.AbstractEventLoop) -> None:
        loops = [listener.loop for listener in self._listeners] + [watcher.loop for watcher in self._watchers]
        if loop not in loops:
            self._let_sleep(loop)

    def _forget_closed_loops(self) -> None:
        # Who listened on a loop that was closed in the middle does not leave, and would keep events from others.
        with self._lock:
            self._listeners = tuple(listener for listener in self._listeners if not listener.loop.is_closed())
        for loop in tuple(self._wakers):
            if loop.is_closed():
                self._let_sleep_unheeded(loop)

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        context = self._context()
        try:
            while context is not None and loop in self._wakers and (taken := context.get_async_event()) is not None:
                found = self.find(taken.element) if taken.element is not None else None
                resource = found if isinstance(found, Resource) else None
                event = DeviceEvent(taken.event_type, resource, taken.port_num)
                element = taken.element
                taken.ack()
                self._tell(event, element)
        except VerbsError:  # as of a device that was unplugged: nobody will hear of anything any more
            self._tell_watchers(None)
            self.stop()
        except ForkedProcessError:  # the parent's loop runs on in a child: these are the parent's events
            return
        except ClosedResourceError:  # by another loop, meanwhile
            self.stop()

    def _tell_watchers(self, element: handles.Handle | None) -> None:
        for watcher in self._watchers:
            watcher.tell(element)

    def _tell(self, event: DeviceEvent, element: handles.Handle | None) -> None:
        if event.event_type is EventType.DEVICE_FATAL:
            self._tell_watchers(None)
        elif event.event_type is EventType.CQ_ERR and element is not None:  # else it is of somebody beside us
            self._tell_watchers(element)
        self._forget_closed_loops()
        with self._lock:
            listeners = [listener for listener in self._listeners if listener.concerns(event)]
            if not listeners:
                self._unheard.append(_Unheard(event))
        for listener in listeners:
            listener.tell(event)


H = TypeVar("H", bound=handles.Handle)


class AsyncEventSource(HandleResource[H]):
    """What asynchronous events happen to: queue pairs, completion queues and shared receive queues."""

    def events(self) -> AsyncGenerator[DeviceEvent, None]:
        """Asynchronous events that happen to it: ``async for``, on any asyncio event loop, until it is closed.

        Those that nobody heard of yet come first. `Device.events` has those of everything. The event loop that asks for
        the first event owns the iterator.

        :raises ClosedResourceError: it is not open.
        """
        return EventPump.of(self.handle.context).listen(self)


publish(__name__)
