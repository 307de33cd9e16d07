"""Asynchronous events of a device, distributed to listeners on several event loops."""

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

_MAX_UNDELIVERED = 1024  # maximum number of events queued without a listener; the oldest are dropped


@dataclass(frozen=True)
class DeviceEvent:
    """An asynchronous event of a device, a port or a queue (``ibv_get_async_event``), already acknowledged.

    Yielded by `Device.events` and by the ``events`` of queue pairs, completion queues and shared receive queues.

    :param event_type: type of the event.
    :param resource: queue pair, completion queue or shared receive queue that the event concerns; None for an event of
        the device or a port, and if the resource was garbage collected.
    :param port_num: number of the port that the event concerns; None for other events.
    """

    event_type: EventType
    resource: Resource | None
    port_num: int | None


class _UndeliveredEvent:
    """An event that has had no listener so far. It refers to its resource weakly and so does not keep it alive."""

    def __init__(self, event: DeviceEvent) -> None:
        self._type = event.event_type
        self._resource = weakref.ref(event.resource) if event.resource is not None else None
        self._port_num = event.port_num

    def event(self) -> DeviceEvent:
        """Return a `DeviceEvent`; its ``resource`` is None if the resource has been garbage collected since then."""
        return DeviceEvent(self._type, self._resource() if self._resource is not None else None, self._port_num)


class _Listener:
    """A listener on the running event loop, for all events or those of one resource. Made by `EventPump.listen`.

    :param resource: resource whose events to receive; None to receive all events.
    :raises RuntimeError: no asyncio event loop is running.
    """

    def __init__(self, resource: Resource | None) -> None:
        self.loop = running_loop()
        self._resource = resource
        self._events: deque[DeviceEvent | None] = deque()
        self._condition = (
            lifecycle_of(resource).condition() if resource is not None else CrossLoopCondition()
        )  # notified when the resource is closed

    def concerns(self, event: DeviceEvent) -> bool:
        """Return whether an event is for the listener, which listens to all events or to those of its resource."""
        return self._resource is None or self._resource is event.resource

    def notify(self, event: DeviceEvent | None) -> None:
        """Queue an event for the listener and wake it up; None ends its iteration. Can be called from any thread."""
        self._events.append(event)
        self._condition.notify()

    async def next(self) -> DeviceEvent | None:
        """Wait for the next event and return it; return None once the listener's resource or the device is closed.

        Events that arrived before are returned first.
        """
        await self._condition.wait_while(lambda: not self._events and not self._has_ended())
        return self._events.popleft() if self._events else None

    def _has_ended(self) -> bool:
        """Return whether the listener's resource is closed; always False for a listener to all events.

        Events that arrived before the resource was closed are still returned by `next`.
        """
        return self._resource is not None and self._resource.closed


class _Watcher:
    """A function on one event loop, called when the device is lost or a queue fails. Made by `EventPump.watch`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, broken: Callable[[handles.Handle | None], None]) -> None:
        self.loop = loop
        self._broken = broken

    def notify(self, element: handles.Handle | None) -> None:
        """Schedule a call of the watcher's function on its event loop; do nothing if that loop is closed.

        Can be called from any thread.

        :param element: handle of the failed completion queue, passed to the function; None if the device is lost.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._broken, element)


class _Waker:
    """Wakes one event loop when events are available, through a duplicate of the context's descriptor.

    The context may be closed on another loop while this one polls. The duplicate ensures that the polled descriptor
    stays open. A loop that polled a closed descriptor would miss events of the next file with that number, and libuv
    would end the process.

    :param loop: event loop to wake, running in this thread.
    :param fd: descriptor of the context's events; the caller keeps it.
    :param readable: called on `loop` while events are available.
    :raises OSError: the process has no file descriptors left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, readable: Callable[[], None]) -> None:
        self._loop = loop
        self._forks = forks.count
        self._fd = os.dup(fd)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # the loop of a daemon thread may poll the descriptor until the process ends
        loop.add_reader(self._fd, readable)

    def stop(self) -> None:
        """Stop waking the loop and close the duplicate descriptor. Call once, from any thread.

        Outside the waker's loop, this only schedules `_stop` on that loop and does not wait for it; if that loop is
        closed, only the descriptor is closed.
        """
        if asyncio._get_running_loop() is self._loop:
            self._stop()
            return
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:  # the loop is closed and polls nothing
            self._close()

    def _stop(self) -> None:
        """Do the work of `stop` on the waker's loop; do nothing in the child of a fork."""
        # The kernel's poll set is shared with the parent process: removing the descriptor would affect the parent's
        # loop.
        if self._forks != forks.count:
            return
        self._loop.remove_reader(self._fd)
        self._close()


class EventPump:
    """Receives the events of a context and passes them to all listeners and watchers.

        device descriptor readable
          -> loop A and loop B wake up
          -> loop A: get_async_event, ack, notify all listeners and watchers (also those on loop B)
          -> loop B: get_async_event returns nothing

    Each context has one pump: `EventPump.of`.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[handles.Context, "EventPump"]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, context: handles.Context) -> "EventPump":
        """Return the pump of a context. The first call for a context makes the pump.

        The code that opens a context calls this before any other thread knows the context, so that only one pump is
        made.
        """
        pump = cls._of.get(context)
        if pump is None:
            pump = cls._of[context] = cls(context)
        return pump

    def __init__(self, context: handles.Context) -> None:
        # A weak reference: the registry of pumps is keyed by the context, and listeners and watchers keep the context
        # alive.
        self._context = weakref.ref(context)
        self._forks = forks.count
        self._fd = context.async_fd
        self._lock = threading.RLock()  # reentrant: a signal handler may call `is_lost` in the middle of a section
        self._lost = False  # set once, before any watcher or listener is told
        self._wakers: dict[asyncio.AbstractEventLoop, _Waker] = {}  # each loop adds its own waker
        # Immutable tuples: any thread reads them without the lock, and replaces them under the lock.
        self._listeners: tuple[_Listener, ...] = ()
        self._watchers: tuple[_Watcher, ...] = ()
        self._undelivered: deque[_UndeliveredEvent] = deque(maxlen=_MAX_UNDELIVERED)  # under the lock
        self.find: Callable[[handles.Handle], object] = lambda _: None  # returns the user's object of a handle

    def listen(self, resource: Resource | None = None) -> AsyncGenerator[DeviceEvent, None]:
        """Return an iterator over events, beginning with events that were queued because they had no listener.

        Any event loop may request the first event; that loop then owns the iterator.

        :param resource: resource whose events to yield, until it is closed; None to yield all events, until the device
            is closed.
        :returns: an asynchronous iterator of `DeviceEvent`, which raises the exceptions below during iteration.
        :raises AffinityError: another event loop owns the iterator; nothing was done.
        :raises ForkedProcessError: the context was opened before a fork, in the parent process.
        :raises RuntimeError: no asyncio event loop is running.
        :raises OSError: the process has no file descriptors left.
        """
        name = f"events of {self._context() if resource is None else resource}"
        return OwnedIterator(name, self._listen(resource), lambda: None)

    async def _listen(self, resource: Resource | None) -> AsyncGenerator[DeviceEvent, None]:
        """Yield the events that `listen` describes, on the running event loop, with the exceptions listed there."""
        self._check_process()
        self._drop_closed_loops()
        listener = _Listener(resource)
        with self._lock:
            self._listeners += (listener,)
            for _ in range(len(self._undelivered)):  # `is_lost` in a signal handler may append others
                each = self._undelivered.popleft()
                if listener.concerns(event := each.event()):
                    listener.notify(event)
                else:
                    self._undelivered.append(each)
        try:
            self._start_waking(listener.loop)
            while (received := await listener.next()) is not None:
                yield received
                self._check_process()
        finally:
            if self._forks == forks.count:  # otherwise the lock's holder is not in this process
                with self._lock:
                    self._listeners = tuple(other for other in self._listeners if other is not listener)
                self._stop_waking_if_unused(listener.loop)

    def _check_process(self) -> None:
        """Check that the context was opened in this process.

        :raises ForkedProcessError: the context was opened before a fork, in the parent process.
        """
        if self._forks != forks.count:
            raise ForkedProcessError(f"{self._context() or 'its device'}")

    def watch(self, broken: Callable[[handles.Handle | None], None]) -> "_Watcher":
        """Register a function to be called on the running loop when the device is lost or one of its completion queues
        fails.

        Use this to fail the tasks that await completions: in these cases no completion event wakes them. `unwatch` ends
        the registration.

        :param broken: called with the handle of the failed completion queue, or with None if the device is lost.
        :returns: the watcher, to be passed to `unwatch`.
        :raises RuntimeError: no asyncio event loop is running.
        :raises OSError: the process has no file descriptors left.
        """
        watcher = _Watcher(running_loop(), broken)
        with self._lock:
            self._watchers += (watcher,)
        try:
            self._start_waking(watcher.loop)
        except BaseException:
            self.unwatch(watcher)
            raise
        return watcher

    def unwatch(self, watcher: "_Watcher") -> None:
        """Unregister a watcher that `watch` returned. Call this on the event loop that called `watch`."""
        with self._lock:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)
        self._stop_waking_if_unused(watcher.loop)

    def is_lost(self) -> bool:
        """Return whether the device is lost, according to the events so far. Can be called from any thread.

        Available events are received first, because no loop receives them while nothing awaits completions.
        """
        if not self._lost:
            self._receive(lambda: True)
        return self._lost

    async def drain(self) -> None:
        """Stop receiving events and end all iterations over them, as `stop` does, without waiting for anything. Closing
        the device awaits this.
        """
        self.stop()

    def stop(self) -> None:
        """End all iterations over events and stop waking event loops, so that no further event is received.

        This can be called from any thread.
        """
        for listener in self._listeners:
            listener.notify(None)
        for loop in tuple(self._wakers):
            self._stop_waking(loop)

    # ---- Event loops to wake up

    def _start_waking(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let available events wake a loop, which must be running in this thread; do nothing if they already wake it.

        :raises OSError: the process has no file descriptors left.
        """
        if loop not in self._wakers:
            self._wakers[loop] = _Waker(loop, self._fd, functools.partial(self._readable, loop))

    def _stop_waking(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let available events no longer wake a loop; do nothing if it has no waker. Can be called from any thread."""
        waker = self._wakers.pop(loop, None)
        if waker is not None:
            waker.stop()

    def _stop_waking_if_unused(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let events no longer wake a loop if it has no listener and no watcher left."""
        loops = [listener.loop for listener in self._listeners] + [watcher.loop for watcher in self._watchers]
        if loop not in loops:
            self._stop_waking(loop)

    def _drop_closed_loops(self) -> None:
        """Remove all listeners on closed loops, and the wakers of closed loops that have no watcher."""
        # A listener on a loop that was closed during its iteration cannot unregister itself, and would still get
        # events.
        with self._lock:
            self._listeners = tuple(listener for listener in self._listeners if not listener.loop.is_closed())
        for loop in tuple(self._wakers):
            if loop.is_closed():
                self._stop_waking_if_unused(loop)

    def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive all available events. This is called on a loop that its waker has woken."""
        self._receive(lambda: loop in self._wakers)

    def _receive(self, goes_on: Callable[[], bool]) -> None:
        """Receive, acknowledge and dispatch all available events, as long as `goes_on` returns True.

        No exception is raised. If receiving fails, all watchers are notified that the device is lost, and all
        iterations end. If the context is closed, all iterations end. In a forked child, nothing is received.
        """
        context = self._context()
        try:
            while context is not None and goes_on() and (received := context.get_async_event()) is not None:
                found = self.find(received.element) if received.element is not None else None
                resource = found if isinstance(found, Resource) else None
                event = DeviceEvent(received.event_type, resource, received.port_num)
                element = received.element
                received.ack()
                self._dispatch(event, element)
        except VerbsError:  # for example the device was unplugged: no further events will arrive
            self._notify_watchers(None)
            self.stop()
        except ForkedProcessError:  # in a child, a copy of the parent's loop runs: the events are the parent's
            return
        except ClosedResourceError:  # another loop has closed the context
            self.stop()

    def _notify_watchers(self, element: handles.Handle | None) -> None:
        """Notify all watchers of a failed completion queue, given by its handle, or of a lost device, given by None."""
        if element is None:
            self._lost = True
        for watcher in self._watchers:
            watcher.notify(element)

    def _dispatch(self, event: DeviceEvent, element: handles.Handle | None) -> None:
        """Pass an event to all listeners that it is for; if there are none, queue it for later listeners.

        The watchers are notified as well if the event reports a lost device or a failed completion queue.

        :param event: event, already acknowledged.
        :param element: handle of the queue that the event concerns; None for an event of the device or a port.
        """
        if event.event_type is EventType.DEVICE_FATAL:
            self._notify_watchers(None)
        elif event.event_type is EventType.CQ_ERR and element is not None:  # otherwise not made by this library
            self._notify_watchers(element)
        self._drop_closed_loops()
        with self._lock:
            listeners = [listener for listener in self._listeners if listener.concerns(event)]
            if not listeners:
                self._undelivered.append(_UndeliveredEvent(event))
        for listener in listeners:
            listener.notify(event)


H = TypeVar("H", bound=handles.Handle)


class AsyncEventSource(HandleResource[H]):
    """Base class of resources with asynchronous events: queue pairs, completion queues and shared receive queues."""

    def events(self) -> AsyncGenerator[DeviceEvent, None]:
        """Return an iterator over the asynchronous events of this resource (``ibv_get_async_event``).

        Use ``async for`` on any asyncio event loop; the loop that requests the first event owns the iterator. Events
        that occurred while there was no listener come first. The iteration ends when the resource is closed.
        `Device.events` returns an iterator over the events of all resources.

        :returns: an asynchronous iterator of `DeviceEvent`.
        :raises ClosedResourceError: the resource is not open.
        :raises AffinityError: during iteration: another event loop owns the iterator; nothing was done.
        :raises ForkedProcessError: during iteration: the device was opened before a fork, in the parent process.
        :raises RuntimeError: during iteration: no asyncio event loop is running.
        :raises OSError: during iteration: the process has no file descriptors left.
        """
        return EventPump.of(self.handle.context).listen(self)


publish(__name__)
