"""Worker processes from inside: the main function of the interpreters that a pool spawns."""

import asyncio
import contextlib
import contextvars
import functools
import os
import pickle
import signal
import socket
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from aioverbs._lifecycle import forks
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
    """Settings of a worker process, which the pool sends to that process pickled.

    :param device: name of the device.
    :param execution: execution of a software device's work requests.
    :param delay_ns: delay of a software device, in nanoseconds.
    :param max_native_thread_domains: limit of thread domains without locks, as for `open_device`.
    :param shared: ID and key of the pool's protection domain, if processes can share it. Then the process receives the
        device's context over a socket.
    :param worker: settings that all workers share.
    """

    device: str
    execution: Execution
    delay_ns: int
    max_native_thread_domains: int | None
    shared: tuple[int, int] | None
    worker: WorkerSettings

    @staticmethod
    def of(device: Device, worker: WorkerSettings, shared: tuple[int, int] | None) -> "ProcessSettings":
        """Return the settings for the worker processes of a pool, as a `ProcessSettings`.

        :param device: open device of the pool.
        :param worker: settings that all workers share.
        :param shared: ID and key of the shared protection domain; None if it cannot be shared.
        """
        execution, delay_ns, limit = open_arguments(device)
        # The network address after "@" belongs to this process.
        name = device.name.partition("@")[0] if device.software else device.name
        return ProcessSettings(name, execution, delay_ns, limit, shared, worker)


@dataclass(frozen=True)
class Ready:
    """Contents of a READY frame.

    :param native: True if the worker's resource domain takes no locks.
    """

    native: bool


@dataclass(frozen=True)
class SpawnedWorker:
    """Object that `multiprocessing.spawn` unpickles and runs in a new process, after it has imported the main module.

    :param number: number of the worker.
    :param settings: pickled `ProcessSettings`, so that an error in unpickling them can be reported to the pool.
    :param pool_process: ID of the pool's process.
    :param link: descriptor of the socket that carries frames.
    :param share: descriptor of the socket over which the pool shares its protection domain, if it does.
    :param fd_channel: descriptor of the socket over which the pool sends sockets.
    """

    number: int
    settings: bytes
    pool_process: int
    link: int
    share: int
    fd_channel: int

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the worker until the pool stops it or is gone, as the main function of the process.

        If the settings cannot be unpickled, or their `loop` is invalid or not installed, send the exception to the pool
        and return.

        :param parent_sentinel: descriptor that is closed without being used: the link and a pidfd show the end of the
            pool's process.
        :returns: 0, the exit status of the process.
        :raises OSError: the exception cannot be sent, because the pool is gone.
        :raises BaseException: an exception ended the loop. Whatever this raises, the process then exits with a
            traceback.
        """
        os.close(parent_sentinel)
        sock, fd_channel = socket.socket(fileno=self.link), socket.socket(fileno=self.fd_channel)
        for each in (sock, fd_channel):
            os.register_at_fork(after_in_child=each.close)  # else children would hide this process's exit
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's process receives it as well, and decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since the process was spawned
        try:
            settings: ProcessSettings = pickle.loads(self.settings)
            factory = loop_factory(settings.worker.loop)
        except Exception as error:
            sock.sendall(encode_frame(FrameType.FAILED, 0, pickled_error(error)))
            return 0
        with asyncio.Runner(loop_factory=factory) as runner:
            worker = _WorkerProcess(self.number, settings, self.pool_process, sock, self.share, fd_channel)
            runner.run(worker.serve())
        return 0


class _ReceivedCall(CrossLoopCall[Any]):
    """Call that was received over the link."""

    __slots__ = ("_number", "_process")

    def __init__(self, process: "_WorkerProcess", number: int, payload: bytes) -> None:
        super().__init__(self._call, (payload,), self, process.worker)
        self._process = process
        self._number = number
        self.loop = process.worker.loop

    @staticmethod
    def _call(payload: bytes) -> Any:
        """Unpickle a function and its arguments, call the function and return its result.

        :raises Exception: whatever unpickling or the function raised.
        """
        function, args = pickle.loads(payload)
        return function(*args)

    def settle(self, result: object, error: BaseException | None) -> None:
        """Send the result or the exception of the call to the pool, unless the worker's loop is ending.

        If the result cannot be pickled or sent, send the exception that this raised.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """
        if self._process.is_ending():
            return  # the pool ends all calls when the process exits
        self._process.calls.pop(self._number, None)
        link = self._process.link
        assert link is not None
        if error is None:
            try:
                link.send(FrameType.RESULT, self._number, pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
                return
            except Exception as why:  # such as MemoryError: the frame is made before any of it is sent
                with contextlib.suppress(Exception):  # a class of exceptions may refuse notes
                    why.add_note("results of worker processes are pickled")
                error = why
        if isinstance(error, asyncio.CancelledError):
            link.send(FrameType.CANCELLED, self._number)
        else:
            link.send(FrameType.ERROR, self._number, pickled_error(error))

    def cancellation(self) -> BaseException:
        """Return a new `asyncio.CancelledError`, for a call that was cancelled in this process."""
        return asyncio.CancelledError()  # the pool knows whether it cancelled the call

    def leave(self, error: BaseException) -> None:
        """Do nothing. This is called when the function ends the loop: the process exits, and the pool ends its calls.

        :param error: SystemExit or KeyboardInterrupt that the function raised.
        """


class _ReceivedSocketCall(_ReceivedCall):
    """Call whose function takes a socket. The function detaches the descriptor from the socket object."""

    __slots__ = ("_socket",)

    def __init__(self, process: "_WorkerProcess", number: int, payload: bytes, sock: socket.socket) -> None:
        super().__init__(process, number, payload)
        self._socket = sock
        self._function = self._call_with_socket

    def _call_with_socket(self, payload: bytes) -> Any:
        """Unpickle the function and its further arguments, and return the result of the function.

        The function is called with the socket, the callback `_report` and the further arguments.

        :raises Exception: whatever unpickling or the function raised.
        """
        function, args = _unpickled(payload)
        return function(self._socket, self._report, *args)

    def _report(self, value: bool) -> None:
        """Send `value` to the pool. This is the callback that is passed to the function.

        Do nothing if there is no link to the pool.
        """
        if self._process.link is not None:
            self._process.link.send(FrameType.REPORT, self._number, b"1" if value else b"")

    def settle(self, result: object, error: BaseException | None) -> None:
        """Close the socket, and send the result or the exception of the call to the pool as `_ReceivedCall` does.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """
        self._socket.close()  # in case the function was not called
        super().settle(result, error)


@functools.lru_cache(maxsize=16)
def _unpickled(payload: bytes) -> Any:
    """Return the unpickled function and further arguments of a call with a socket, as a tuple ``(function, args)``.

    The results are cached, because all calls from one server have the same payload.

    :raises Exception: whatever unpickling raised.
    """
    return pickle.loads(payload)


class _WorkerProcess:
    """Worker inside of its own process. The parameters are those of `SpawnedWorker`, with sockets for two descriptors.

    :param number: number of the worker.
    :param settings: settings of the process.
    :param pool_process: ID of the pool's process.
    :param sock: socket that carries frames.
    :param share: descriptor of the socket over which the pool shares its protection domain.
    :param fd_channel: socket over which the pool sends sockets.
    """

    worker: Worker

    def __init__(
        self,
        number: int,
        settings: ProcessSettings,
        pool_process: int,
        sock: socket.socket,
        share: int,
        fd_channel: socket.socket,
    ) -> None:
        self._number = number
        self._settings = settings
        self._pool_process = pool_process
        self._sock = sock
        self._share = share
        self._fd_channel = fd_channel
        self._stop = asyncio.Event()
        self._main_task: asyncio.Task[None] | None = None
        self.link: Link | None = None
        self.calls: dict[int, _ReceivedCall] = {}

    async def serve(self) -> None:
        """Start the worker, execute calls until the pool stops the worker or is gone, and then close everything.

        If the worker cannot be started, send the exception to the pool and return.

        :raises OSError: the exception cannot be sent, because the pool is gone.
        :raises Exception: whatever closing the device or the domains, or leaving the pool's `setup` raised.
        """
        self._main_task = asyncio.current_task()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close_link)
            try:
                device, pd = await stack.enter_async_context(self._open_device_and_pd())
                self.worker = await stack.enter_async_context(
                    worker_context(self._number, device, pd, self._settings.worker)
                )
            except Exception as error:
                self._sock.sendall(encode_frame(FrameType.FAILED, 0, pickled_error(error)))  # small enough not to block
                return
            loop = asyncio.get_running_loop()
            self._sock.setblocking(False)
            _, link = await loop.create_unix_connection(lambda: Link(self._on_frame), sock=self._sock)
            link.disconnected.add_done_callback(lambda _: self._stop.set())
            link.send(FrameType.READY, 0, pickle.dumps(Ready(self.worker.domain.native)))
            self.link = link
            with self._watched_pool(link):
                await self._stop.wait()

    @contextlib.contextmanager
    def _watched_pool(self, link: Link) -> Iterator[None]:
        """Abort the link during the block when the pool's process exits, which stops the worker.

        A forked child of that process may keep the other end of the link open. Without a pidfd (kernel older than 5.3,
        system call filter, no free descriptors), only the link shows the end.
        """
        try:
            pidfd = os.pidfd_open(self._pool_process)
        except (AttributeError, OSError):  # AttributeError: CPython was built with the headers of an older kernel
            if os.getppid() != self._pool_process:
                link.abort()
            yield
            return
        loop, forks_before = asyncio.get_running_loop(), forks.count
        try:
            loop.add_reader(pidfd, link.abort)
            if os.getppid() != self._pool_process:  # it had exited, and another process has its number
                link.abort()
            yield
        finally:
            if forks.count == forks_before:  # a forked child that ends shares the epoll set with this process
                loop.remove_reader(pidfd)
            os.close(pidfd)

    async def _close_link(self) -> None:
        """Close the link to the pool, if there is one, and wait until the pending frames have been sent."""
        if self.link is not None:
            self.link.close()
            await asyncio.wait([self.link.disconnected])

    @contextlib.asynccontextmanager
    async def _open_device_and_pd(self) -> AsyncGenerator[tuple[Device, ProtectionDomain], None]:
        """Open the device and a protection domain: the pool's if that can be shared, else a new one.

        :returns: async context manager that yields a tuple of the device and the protection domain, and closes both at
            the end. Entering the block raises whatever opening a device from `import_device` or `open_device` raises,
            and `VerbsError` if the protection domain cannot be opened.
        """
        settings = self._settings
        if settings.shared is None:
            os.close(self._share)
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
        """Handle a frame from the pool: start or cancel a call, or stop the worker.

        If the socket of a call cannot be received, the call ends with the `OSError`, which is sent to the pool. A
        request to cancel a call that has ended has no effect.

        :param frame_type: type of the frame.
        :param number: number of the call; 0 if the frame belongs to no call.
        :param payload: pickled function and arguments of a call to start; empty otherwise.
        """
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
        """Record a received call, and start it in the next turn of the loop."""
        self.calls[number] = call
        self.worker.loop.call_soon(call.start, context=contextvars.Context())

    def is_ending(self) -> bool:
        """Return whether the loop is ending: its main task has ended or is being cancelled."""
        assert self._main_task is not None
        return self._main_task.done() or self._main_task.cancelling() > 0
