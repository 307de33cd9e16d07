"""Workers that are processes, from within: what the interpreter runs that a pool spawned."""

import asyncio
import contextlib
import contextvars
import functools
import os
import pickle
import signal
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from aioverbs._lifecycle.cross_loop import CrossLoopCall
from aioverbs._pool.pickled_errors import pickled_error
from aioverbs._pool.process_protocol import FrameType, Link, encode_frame, receive_socket
from aioverbs._pool.worker import Worker, WorkerSettings, loop_factory, worker_context
from aioverbs._verbs.device import Device, open_arguments, open_device
from aioverbs._verbs.imported_device import import_device
from aioverbs._verbs.protection_domain import ProtectionDomain
from aioverbs.attributes import Execution

__all__ = ["ProcessSettings", "Ready", "SpawnedWorker"]


@dataclass(frozen=True)
class ProcessSettings:
    """What a worker is to be, as it goes to its process.

    :param shared: the id and the key of the pool's protection domain, where processes can share it; then the worker
        is sent the device's context over a socket of its own.
    """

    device: str
    execution: Execution
    delay_ns: int
    max_native_thread_domains: int | None
    shared: tuple[int, int] | None
    worker: WorkerSettings

    @staticmethod
    def of(device: Device, worker: WorkerSettings, shared: tuple[int, int] | None) -> "ProcessSettings":
        """For workers of a pool on an open device."""
        execution, delay_ns, limit = open_arguments(device)
        name = device.name.partition("@")[0] if device.software else device.name  # its address is this process's
        return ProcessSettings(name, execution, delay_ns, limit, shared, worker)


@dataclass(frozen=True)
class Ready:
    """What a worker says of itself when it is at work."""

    native: bool


@dataclass(frozen=True)
class SpawnedWorker:
    """What `multiprocessing.spawn` makes and runs in a new process, when the main module is there.

    :param number: the worker's.
    :param settings: its `ProcessSettings`, pickled: what keeps them from being made is told to the pool.
    :param link: the descriptor of a socket to the pool.
    :param share: that of another one, over which the pool shares its protection domain, where it does.
    :param door: that of another one, over which sockets come.
    """

    number: int
    settings: bytes
    link: int
    share: int
    fd_channel: int

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Be a worker, until the pool says otherwise or is gone, and return the status of the process.

        :param parent_sentinel: a descriptor that tells others of the parent's end; the link does that here.
        """
        os.close(parent_sentinel)
        sock, fd_channel = socket.socket(fileno=self.link), socket.socket(fileno=self.fd_channel)
        for each in (sock, fd_channel):
            os.register_at_fork(after_in_child=each.close)  # or children of this process would keep it from ending
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the pool's process, too, which decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # from the beginning until now
        try:
            settings: ProcessSettings = pickle.loads(self.settings)
            factory = loop_factory(settings.worker.loop)
        except Exception as error:
            sock.sendall(encode_frame(FrameType.FAILED, 0, pickled_error(error)))
            return 0
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(_WorkerProcess(self.number, settings, sock, self.share, fd_channel).serve())
        return 0


class _ReceivedCall(CrossLoopCall[Any]):
    """A call that came over the link."""

    __slots__ = ("_number", "_process")

    def __init__(self, process: "_WorkerProcess", number: int, payload: bytes) -> None:
        super().__init__(self._call, (payload,), self, process.worker)
        self._process = process
        self._number = number
        self.loop = process.worker.loop

    @staticmethod
    def _call(payload: bytes) -> Any:
        function, args = pickle.loads(payload)
        return function(*args)

    def settle(self, result: object, error: BaseException | None) -> None:
        if self._process.is_ending():
            return  # the pool is told of that
        self._process.calls.pop(self._number, None)
        link = self._process.link
        assert link is not None
        if error is None:
            try:
                payload = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            except Exception as why:
                why.add_note("what a worker process returns goes by pickle")
                error = why
            else:
                link.send(FrameType.RESULT, self._number, payload)
                return
        if isinstance(error, asyncio.CancelledError):
            link.send(FrameType.CANCELLED, self._number)
        else:
            link.send(FrameType.ERROR, self._number, pickled_error(error))

    def cancellation(self) -> BaseException:
        return asyncio.CancelledError()  # the pool knows whether it asked for it

    def leave(self, error: BaseException) -> None:
        """The process ends, which the pool is told of."""


class _ReceivedSocketCall(_ReceivedCall):
    """One whose function gets a socket, which it takes out of its object."""

    __slots__ = ("_socket",)

    def __init__(self, process: "_WorkerProcess", number: int, payload: bytes, sock: socket.socket) -> None:
        super().__init__(process, number, payload)
        self._socket = sock
        self._function = self._call_with_socket

    def _call_with_socket(self, payload: bytes) -> Any:
        function, args = _unpickled(payload)
        return function(self._socket, self._report, *args)

    def _report(self, value: bool) -> None:
        if self._process.link is not None:
            self._process.link.send(FrameType.REPORT, self._number, b"1" if value else b"")

    def settle(self, result: object, error: BaseException | None) -> None:
        self._socket.close()  # where it was not called
        super().settle(result, error)


@functools.lru_cache(maxsize=16)
def _unpickled(payload: bytes) -> Any:
    """What all visits to one server have in common: it is made once."""
    return pickle.loads(payload)


class _WorkerProcess:
    """A worker in its process."""

    worker: Worker

    def __init__(
        self, number: int, settings: ProcessSettings, sock: socket.socket, share: int, fd_channel: socket.socket
    ) -> None:
        self._number = number
        self._settings = settings
        self._sock = sock
        self._share = share
        self._fd_channel = fd_channel
        self._stop = asyncio.Event()
        self._main_task: asyncio.Task[None] | None = None
        self.link: Link | None = None
        self.calls: dict[int, _ReceivedCall] = {}

    async def serve(self) -> None:
        """Until the end."""
        self._main_task = asyncio.current_task()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_link)
            try:
                device, pd = await stack.enter_async_context(self._open_device_and_pd())
                self.worker = await stack.enter_async_context(
                    worker_context(self._number, device, pd, self._settings.worker)
                )
            except Exception as error:
                self._sock.sendall(
                    encode_frame(FrameType.FAILED, 0, pickled_error(error))
                )  # it is small, and blocks for no time
                return
            loop = asyncio.get_running_loop()
            self._sock.setblocking(False)
            _, link = await loop.create_unix_connection(lambda: Link(self._on_frame), sock=self._sock)
            link.disconnected.add_done_callback(lambda _: self._stop.set())
            link.send(FrameType.READY, 0, pickle.dumps(Ready(self.worker.domain.native)))
            self.link = link
            await self._stop.wait()

    async def _close_link(self) -> None:
        if self.link is not None:
            self.link.close()
            await asyncio.wait([self.link.disconnected])

    @contextlib.asynccontextmanager
    async def _open_device_and_pd(self) -> AsyncGenerator[tuple[Device, ProtectionDomain], None]:
        """The device, and the pool's protection domain; where that cannot be shared, one of its own."""
        settings = self._settings
        if settings.shared is None:
            async with (
                open_device(
                    settings.device,
                    max_native_thread_domains=settings.max_native_thread_domains,
                    execution=settings.execution,
                    delay_ns=settings.delay_ns,
                ) as device,
                device.protection_domain() as pd,
            ):
                yield device, pd
            return
        async with contextlib.AsyncExitStack() as stack:
            with socket.socket(fileno=self._share) as sock:
                sock.setblocking(False)
                device = await stack.enter_async_context(
                    import_device(sock, *settings.shared, max_native_thread_domains=settings.max_native_thread_domains)
                )
            pd = await stack.enter_async_context(device.shared_protection_domain(*settings.shared))
            yield device, pd

    def _on_frame(self, frame_type: FrameType, number: int, payload: bytes) -> None:
        if frame_type is FrameType.CALL:
            self._start_call(number, _ReceivedCall(self, number, payload))
        elif frame_type is FrameType.SOCKET_CALL:
            assert self.link is not None
            try:
                sock = receive_socket(self._fd_channel)
            except OSError as error:
                self.link.send(FrameType.ERROR, number, pickled_error(error))
            else:
                self._start_call(number, _ReceivedSocketCall(self, number, payload, sock))
        elif frame_type is FrameType.CANCEL:
            if (call := self.calls.get(number)) is not None:
                call.withdraw()
        elif frame_type is FrameType.STOP:
            self._stop.set()

    def _start_call(self, number: int, call: _ReceivedCall) -> None:
        self.calls[number] = call
        self.worker.loop.call_soon(call.start, context=contextvars.Context())

    def is_ending(self) -> bool:
        """Whether its loop cancels everything because something ended it."""
        assert self._main_task is not None
        return self._main_task.done() or self._main_task.cancelling() > 0
