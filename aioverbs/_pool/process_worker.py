"""Worker processes as seen by the pool: spawning, calls, and detection of their exit."""

import asyncio
import contextlib
import errno
import functools
import itertools
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from aioverbs._durations import duration
from aioverbs._lifecycle.affinity import Affinity
from aioverbs._lifecycle.cross_loop import ResultSink
from aioverbs._pool.pickled_errors import unpickled_error
from aioverbs._pool.process_exit import ExitWatch
from aioverbs._pool.process_main import ProcessSettings, Ready, SpawnedWorker
from aioverbs._pool.process_protocol import FrameType, Link, send_socket
from aioverbs._pool.supervisor import Counts, PendingCall, Supervisor, WorkerHandle
from aioverbs._verbs.protection_domain import DomainShare
from aioverbs.errors import BrokenResourceError, ClosedResourceError

__all__ = ["ProcessWorker", "SocketCall", "pickled_call"]

_START_S = 60.0  # time limit for a new process, which imports the main module, to become ready
_EXIT_S = 10.0  # time limit for a process to exit after it closed its socket; then it is killed
_EXIT_POLL_S = 0.005
_LOOP_POLL_S = 0.1  # interval between checks of the owner's loop by a caller on another loop
_RETRY_S = 0.01  # delay before a socket is sent again after the fd channel was full

_numbers = itertools.count(1)  # numbers of calls


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments as pickled bytes, for a call on a worker process.

    :returns: pickled tuple ``(function, args)``.
    :raises pickle.PicklingError: the function or an argument, such as a lambda, cannot be pickled. `pickle` may raise
        other exceptions instead. A note on the exception says what can be passed.
    """
    try:
        return pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note(
            "worker processes take pickled calls: pass a module's function, and arguments that can be pickled"
        )
        raise


@dataclass(frozen=True)
class SocketCall:
    """Call of a function with a socket and a callback, in a worker process.

    Servers send accepted sockets this way. The alternative, one listener for each worker on the same port
    (SO_REUSEPORT), has three disadvantages: the kernel and not the pool would choose the worker, limits would apply to
    each worker separately, and the connections in the queue of a dead worker would be lost.

    :param payload: function and further arguments, from `pickled_call`.
    :param sock: socket, which is closed in this process after it has been sent to the worker process.
    :param report: function that is called on the pool's loop with each bool that the call reports before it ends.
    """

    payload: bytes
    sock: socket.socket
    report: Callable[[bool], object]


class _ProcessCall(PendingCall):
    """Call that a worker process executes."""

    def __init__(
        self, handle: "ProcessWorker", payload: bytes, outcome: ResultSink[Any], socket_call: SocketCall | None
    ) -> None:
        self.outcome: ResultSink[Any] | None = outcome
        self.number = next(_numbers)
        self.payload = payload
        self.socket_call = socket_call
        self.is_withdrawn = self.is_cancelled_by_caller = self.is_cancelled_by_pool = False
        self.handle = handle

    def post(self) -> None:
        """Send the call to the worker process. This can be called from any thread.

        If the owner's loop has ended, the worker and its calls end instead.
        """
        self.handle.call_on_loop(self.handle.send_call, self)

    def revoke(self) -> None:
        """Cancel the call in the process, or end the call here if its worker is not ready yet.

        This can be called from any thread. It has no effect if the call has ended.
        """
        self.is_withdrawn = True
        if not self.handle.supervisor.withdraw_backlogged(self):
            self.handle.call_on_loop(self.handle.cancel_call, self)


class ProcessWorker(WorkerHandle):
    """Worker process with an event loop and a resource domain.

    Only one loop communicates with the process: the owner, which started it. Other loops and threads schedule their
    requests there.

    :param supervisor: supervisor of the pool.
    :param number: number of the worker in its pool.
    :param counts: counts of the worker and of the workers that it replaces.
    :param owner: event loop that opened the pool, and its thread.
    :param settings: settings of the worker processes.
    :param domain_share: share of the protection domain that is sent to the process; None if each worker opens its own
        domain.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        number: int,
        counts: Counts,
        owner: Affinity,
        settings: ProcessSettings,
        domain_share: DomainShare | None,
    ) -> None:
        super().__init__(supervisor, number, counts)
        assert owner.loop is not None
        self._loop = owner.loop
        self._owner = owner
        self._has_lost_loop = False
        self._settings = settings
        self._domain_share = domain_share
        self.shares_pd = domain_share is not None
        self._sent_calls: dict[int, _ProcessCall] = {}
        self._unsent_sockets: deque[_ProcessCall] = deque()  # calls that wait until their sockets are sent
        self._retry: asyncio.TimerHandle | None = None  # timer that sends them
        self._fd_channel: socket.socket | None = None
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._cause: BaseException | None = None
        self._task: asyncio.Task[str] | None = None

    def call_on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the owner's loop: at once if that is the running loop, else in a later turn of it.

        If the owner's loop has ended, end the worker instead.

        :param function: function to call; its result is ignored.
        :param args: positional arguments of the function.
        """
        if asyncio._get_running_loop() is self._loop:
            function(*args)
            return
        self.poll()
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed just now
            self.poll()

    @property
    def poll_interval_s(self) -> float | None:
        """Seconds between polls by callers on other loops; None if the owner's loop is the running loop.

        Polling is needed because no event reports the end of a loop.
        """
        return _LOOP_POLL_S if asyncio._get_running_loop() is not self._loop else None

    def poll_error(self, call: PendingCall) -> BaseException | None:
        """Poll the worker, and return the exception that ends the wait for a call on a loop that is not the owner's.

        While the owner's loop does not run, the wait for a withdrawn call ends at once, because no result can arrive.
        If that loop has ended, the worker has ended as well, and the supervisor ends the call.

        :param call: call of this worker.
        :returns: `asyncio.CancelledError` if the call was withdrawn and the owner's loop does not run; None if the
            caller is to continue to wait.
        """
        self.poll()
        return asyncio.CancelledError() if call.is_withdrawn and not self._loop.is_running() else None

    def poll(self) -> None:
        """End the worker if the owner's loop, which waits for the process, is closed or its thread has ended.

        In this case, kill the process, block until it has exited, and report its end to the supervisor. Otherwise, and
        in a forked child, do nothing. This can be called from any thread.
        """
        if not self._owner.orphaned or self.supervisor.inherited:
            return
        with self.supervisor.lock:
            had_lost_loop, self._has_lost_loop = self._has_lost_loop, True
        if had_lost_loop:
            return
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._task is not None and (coroutine := self._task.get_coro()) is not None:
            with contextlib.suppress(RuntimeError):  # from a transport, which needs its loop for closing
                coroutine.close()
        self.supervisor.on_worker_end(self, "the event loop that opened the pool has ended", None, is_replaceable=False)

    # ---- Process

    def start(self) -> None:
        """Start a task that spawns the process and communicates with it. Call this on the owner's loop.

        :raises RuntimeError: the owner's loop is closed.
        """
        self._task = self._loop.create_task(self._run_process())
        self._task.add_done_callback(self._on_process_end)  # runs even if the task is cancelled before its start

    def _on_process_end(self, task: "asyncio.Task[str]") -> None:
        """Report to the supervisor that the process has ended, or that the task that waits for it was cancelled.

        :param task: task of `_run_process`, which has ended.
        """
        if task.cancelled():  # by the end of the owner's loop, or by `kill`, after which the reason does not matter
            self.supervisor.on_worker_end(
                self, "the event loop that opened the pool has ended", None, is_replaceable=False
            )
            return
        if (error := task.exception()) is not None:
            reason, self._cause = f"it could not be started: {error}", error
        else:
            reason = task.result()
        self.supervisor.on_worker_end(self, reason, self._cause)

    async def _run_process(self) -> str:
        """After a pause of `pause_s`, spawn the process, communicate with it until it exits, and release everything.

        The process is killed if it is not ready within 60 s, or has not exited 10 s after the link was disconnected.

        :returns: text that says how the process ended, for error messages.
        :raises OSError: the process could not be started, for example because no file descriptor is left (EMFILE).
        :raises Exception: whatever pickling the settings of the worker raised.
        """
        await asyncio.sleep(self.pause_s)
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as until_connected:
            with contextlib.ExitStack() as until_spawned:
                ours, theirs = _socket_pair(until_connected, until_spawned)
                share_ours, share_theirs = _socket_pair(stack, until_spawned)
                self._fd_channel, fd_theirs = _socket_pair(stack, until_spawned, socket.SOCK_SEQPACKET)
                self._fd_channel.setblocking(False)
                self._process = process = self._spawn(theirs, share_theirs, fd_theirs)
                self.process_id = process.pid
            link = self._link = Link(self._on_frame)
            # The link alone does not show the exit: the main module may have forked a child in the worker process
            # before the worker started, and that child keeps the link open.
            watch = ExitWatch(self._loop, process, functools.partial(link.finish_reading, ours))
            ours.setblocking(False)
            try:
                await self._loop.create_unix_connection(lambda: link, sock=ours)
                until_connected.pop_all()  # from now on, the transport closes the socket
                if not self.supervisor.inherited:
                    watch.start()
                with anyio.move_on_after(_START_S) as startup:
                    await self._wait_ready(share_ours, link)
                if startup.cancelled_caught:
                    return f"it did not start within {duration(_START_S)}"
                await asyncio.wait([link.disconnected])
                with anyio.move_on_after(_EXIT_S):
                    while process.poll() is None:  # noqa: ASYNC110  (exits soon, without a notification)
                        await asyncio.sleep(_EXIT_POLL_S)
            finally:
                # In the child of a fork the process belongs to the parent, and the epoll set is shared with the parent.
                if not self.supervisor.inherited:
                    watch.close()
                    if process.poll() is None:
                        process.kill()
                    process.wait()
                    link.abort()  # close() would wait until the process has read all frames
        return f"its process {_describe_exit(process.returncode)}"

    async def _wait_ready(self, share: socket.socket, link: Link) -> None:
        """Share the protection domain with the process, if possible, and wait until the process is ready or gone.

        If sharing fails, the exception is recorded as the cause of the worker's end.

        :param share: socket over which the protection domain is shared.
        :param link: link to the process.
        """
        sharing: asyncio.Task[None] | None = None
        if self._domain_share is not None:
            share.setblocking(False)
            sharing = asyncio.create_task(self._domain_share.send(share))
        ready = asyncio.wrap_future(self.ready)
        try:
            await asyncio.wait([link.disconnected, ready], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            if sharing is not None:
                sharing.cancel()
                await asyncio.wait([sharing])
                error = sharing.exception() if not sharing.cancelled() else None
                # BrokenResourceError: the process is gone, and its exit is the better explanation.
                if error is not None and self._cause is None and not isinstance(error, BrokenResourceError):
                    self._cause = error

    def _spawn(self, *sockets: socket.socket) -> "subprocess.Popen[bytes]":
        """Start a process the way the spawn start method of `multiprocessing` does, and have it run a `SpawnedWorker`.

        `multiprocessing.Process` is not used, for three reasons. In a forked child, `multiprocessing` counts the worker
        as a child of that process as well, and terminates it when that process exits. A daemonic process cannot have
        children. A process that is not daemonic is waited for at exit, however long its calls take.

        :param sockets: the worker's ends of the link, of the socket for sharing and of the fd channel. The caller must
            close them.
        :returns: the process, which the caller must wait for.
        :raises OSError: the process could not be started, for example because no file descriptor is left (EMFILE).
        :raises Exception: whatever pickling the settings of the worker raised.
        """
        descriptors = [sock.fileno() for sock in sockets]
        preparation = multiprocessing.spawn.get_preparation_data(f"{self.supervisor.name}, worker {self.number}")
        preparation["authkey"] = bytes(preparation["authkey"])  # AuthenticationString refuses to be pickled
        spawned = SpawnedWorker(self.number, pickle.dumps(self._settings), os.getpid(), *descriptors)
        with os.fdopen(os.memfd_create("aioverbs worker"), "r+b") as setup:  # a pipe could be too small
            setup.write(pickle.dumps(preparation) + pickle.dumps(spawned))
            setup.seek(0)
            # Ctrl-C is for the pool's process. SIGINT is blocked from the first instruction of the new process onward.
            blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return subprocess.Popen(
                    multiprocessing.spawn.get_command_line(pipe_handle=setup.fileno()),
                    pass_fds=(*descriptors, setup.fileno()),
                    stdin=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name != "AIOVERBS_SOFT_ADDRESS"},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)

    def stop(self) -> None:
        """Tell the worker to end, without waiting until it has ended. This can be called from any thread."""
        self.call_on_loop(self._request_stop)

    def abandon(self) -> None:
        """Tell the worker to end; kill its process if the owner's loop has ended. A finalizer calls this.

        The status of the killed process is left to `poll`, which waits for it, or to the collector.

        :raises RuntimeError: the owner's loop is closed, and the process was not started.
        """
        if self._owner.orphaned:
            self.kill()
        else:
            self._loop.call_soon_threadsafe(self._request_stop)  # later: this may run in the middle of a send

    def _request_stop(self) -> None:
        """Tell the worker to end if it is ready, else kill its process. Call this on the owner's loop."""
        if self.is_ready and self._link is not None:
            self._link.send(FrameType.STOP)
        else:
            self.kill()

    def kill(self) -> bool:
        """Kill the process, or cancel its start, without waiting until it has ended.

        :returns: always True, because a process can be ended by force.
        """
        if self._process is not None:
            self._process.kill()
        elif self._task is not None:
            self._task.cancel()
        return True

    def join(self, timeout_s: float) -> bool:
        """Return True without waiting: a process is reported as ended only after it has been waited for.

        :param timeout_s: ignored.
        """
        return True

    # ---- Calls

    def make_call(self, payload: object, outcome: ResultSink[Any]) -> PendingCall:
        """Return a new call for this worker, which is not sent yet.

        :param payload: a `SocketCall`, or the bytes that `pickled_call` returned.
        :param outcome: object that receives the result or the exception of the call.
        """
        socket_call = payload if isinstance(payload, SocketCall) else None
        data = socket_call.payload if socket_call is not None else payload
        assert isinstance(data, bytes)
        return _ProcessCall(self, data, outcome, socket_call)

    def send_call(self, call: _ProcessCall) -> None:
        """Send a call to the process; if the call was withdrawn, end it as cancelled in the next turn of the loop.

        Call this on the owner's loop, with or without the supervisor's lock.
        """
        if call.is_withdrawn:
            self._loop.call_soon(self.on_done, call, None, call.cancellation())
        elif call.socket_call is None:
            self._send_frame(FrameType.CALL, call)
        else:
            self._unsent_sockets.append(call)
            if self._retry is None:
                self._send_sockets()

    def _send_frame(self, frame_type: FrameType, call: _ProcessCall) -> None:
        """Send the payload of a call to the process in a frame. Do nothing if the process is not connected.

        :param frame_type: CALL or SOCKET_CALL.
        :param call: call to send, which drops its payload.
        """
        payload, call.payload = call.payload, b""
        if self._link is not None:
            self._sent_calls[call.number] = call
            self._link.send(frame_type, call.number, payload)

    def _send_sockets(self) -> None:
        """Send waiting calls with their sockets until the fd channel is full; try again with the others after 10 ms.

        A call whose socket is closed ends in the next turn of the loop. If the process is gone, the remaining calls are
        not sent: they end together with the worker.
        """
        self._retry = None
        while self._unsent_sockets:
            call = self._unsent_sockets[0]
            assert call.socket_call is not None
            assert self._fd_channel is not None
            if call.socket_call.sock.fileno() < 0:  # as by a server whose loop has ended
                self._unsent_sockets.popleft()
                error = ClosedResourceError("the socket was closed before it was sent to a worker process")
                self._loop.call_soon(self.on_done, call, None, error)
                continue
            try:
                send_socket(self._fd_channel, call.socket_call.sock)
            except OSError as failure:
                # With these errors the process is gone, and its end ends the calls. Others (EAGAIN) are temporary.
                if failure.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                    self._retry = self._loop.call_later(_RETRY_S, self._send_sockets)
                return
            self._unsent_sockets.popleft()
            call.socket_call.sock.close()
            self._send_frame(FrameType.SOCKET_CALL, call)

    def cancel_call(self, call: _ProcessCall) -> None:
        """Cancel a call that was sent, or that still waits for its socket to be sent. Call this on the owner's loop.

        Do nothing if the call has ended.
        """
        if call in self._unsent_sockets:
            self._unsent_sockets.remove(call)
            self.on_done(call, None, call.cancellation())
        elif call.number in self._sent_calls and self._link is not None:
            self._link.send(FrameType.CANCEL, call.number)

    def _on_frame(self, frame_type: FrameType, number: int, payload: bytes) -> None:
        """Handle a frame from the process: the process is ready or failed to start, or a call reported a bool or ended.

        :param frame_type: type of the frame.
        :param number: number of the call; 0 if the frame belongs to no call.
        :param payload: pickled contents of the frame.
        """
        if frame_type is FrameType.READY:
            ready: Ready = pickle.loads(payload)
            self.native = ready.native
            self.on_ready()
            return
        if frame_type is FrameType.FAILED:
            self._cause = unpickled_error(payload)
            return
        if frame_type is FrameType.REPORT:
            call = self._sent_calls.get(number)  # None if the connection was closed just after the call ended
            if call is not None and call.socket_call is not None:
                call.socket_call.report(bool(payload))
            return
        call = self._sent_calls.pop(number)
        if frame_type is FrameType.CANCELLED:
            self.on_done(call, None, call.cancellation())
        elif frame_type is FrameType.ERROR:
            self.on_done(call, None, unpickled_error(payload))
        else:
            self._on_result(call, payload)

    def _on_result(self, call: _ProcessCall, payload: bytes) -> None:
        """Complete a call with its unpickled result, or with the exception that unpickling raised.

        :param call: call that has finished.
        :param payload: pickled result of the function.
        """
        try:
            result = pickle.loads(payload)
        except Exception as error:
            with contextlib.suppress(Exception):  # a class of exceptions may refuse notes
                error.add_note("the result of a worker process cannot be unpickled")
            self.on_done(call, None, error)
        else:
            self.on_done(call, result, None)


def _socket_pair(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new socket pair: this process's end and that of a worker process.

    :param ours: stack that closes this process's end.
    :param theirs: stack that closes the worker's end.
    :param kind: type of the sockets.
    :raises OSError: no file descriptor is left (EMFILE).
    """
    pair = socket.socketpair(type=kind)
    for stack, end in zip((ours, theirs), pair, strict=True):
        stack.enter_context(end)
    return pair


def _describe_exit(status: int) -> str:
    """Return text that says how a process ended: ``"ended with status 1"`` or ``"was killed by SIGKILL"``, for example.

    :param status: exit status, or the negative number of the signal that ended the process.
    """
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
