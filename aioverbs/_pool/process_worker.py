"""Workers that are processes, from without."""

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
from aioverbs._pool.process_main import ProcessSettings, Ready, Spawned
from aioverbs._pool.process_protocol import FrameType, Link, send_socket
from aioverbs._pool.supervisor import Counts, PendingCall, Supervisor, WorkerHandle
from aioverbs._verbs.protection_domain import SharedProtectionDomain
from aioverbs.errors import BrokenResourceError

__all__ = ["ProcessWorker", "SocketCall", "pickled_call"]

# For how long a new process may be busy with what its main module imports, and one that closed its socket with its end.
_START_S = 60.0
_EXIT_S = 10.0
_POLL_S = 0.005
_LOOK_S = 0.1  # between two looks at the home loop by a caller that waits elsewhere
_AGAIN_S = 0.01  # after which sockets are sent again that a process had no room for

_numbers = itertools.count(1)  # of calls


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call as it goes to another process.

    :raises PicklingError: it cannot, as a lambda cannot; or another error, with a note.
    """
    try:
        return pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note("what a worker process is to do goes by pickle: a module's function, and arguments that can")
        raise


@dataclass(frozen=True)
class SocketCall:
    """A call that gets a socket first.

    Servers send what they have accepted. If each worker listened for itself, at one port of all (SO_REUSEPORT), the
    kernel would choose the worker, not the pool; limits would be each one's own; and a dead one's queue would be lost.

    :param payload: as `pickled_call` made it.
    :param sock: is closed when it has gone to the worker's process.
    :param tell: called at home with what the call tells before it is over.
    """

    payload: bytes
    sock: socket.socket
    tell: Callable[[bool], object]


class _ProcessJob:
    """A call of a worker's."""

    def __init__(
        self, handle: "ProcessWorker", payload: bytes, outcome: ResultSink[Any], visit: SocketCall | None
    ) -> None:
        self.outcome: ResultSink[Any] | None = outcome
        self.number = next(_numbers)
        self.payload = payload
        self.visit = visit
        self.is_withdrawn = False
        self.is_stopped = False
        self.handle = handle

    def post(self) -> None:
        self.handle.at_home(self.handle.send, self)

    def withdraw(self) -> None:
        self.is_withdrawn = True
        if not self.handle.supervisor.withdraw(self):
            self.handle.at_home(self.handle.withdraw, self)

    def cancellation(self) -> BaseException:
        """How it ends where it was cancelled there."""
        if self.is_stopped:
            return self.handle.supervisor.stopped()
        if self.is_withdrawn:
            return asyncio.CancelledError()
        return BrokenResourceError(f"{self.handle!r} cancelled the call that was sent there")


class ProcessWorker(WorkerHandle):
    """A process with an event loop and a resource domain.

    What is said to it goes through one loop, its home, which started it.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        number: int,
        counts: Counts,
        owner: Affinity,
        settings: ProcessSettings,
        shared: SharedProtectionDomain | None,
    ) -> None:
        super().__init__(supervisor, number, counts)
        assert owner.loop is not None
        self._home = owner.loop
        self._owner = owner
        self._is_lost = False
        self._settings = settings
        self._shared = shared
        self.shares_pd = shared is not None
        self._sent: dict[int, _ProcessJob] = {}
        self._visits: deque[_ProcessJob] = deque()  # whose sockets are to be sent
        self._fd_channel: socket.socket | None = None
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._cause: BaseException | None = None
        self._task: asyncio.Task[str] | None = None

    def at_home(self, function: Callable[..., object], *args: object) -> None:
        """Call something on its home. Where that is gone this is its end."""
        if asyncio._get_running_loop() is self._home:
            function(*args)
            return
        self.look()
        try:
            self._home.call_soon_threadsafe(function, *args)
        except RuntimeError:  # closed, just now
            self.look()

    @property
    def look_s(self) -> float | None:
        """Seconds between two looks elsewhere than at home: the end of that loop is told to nobody."""
        return _LOOK_S if asyncio._get_running_loop() is not self._home else None

    def lost(self, job: PendingCall) -> BaseException | None:
        """Why who waits for a call on another loop than the home waits no longer: nothing comes by one that stands
        still. Where the home is gone, this is the worker's end, which is told."""
        self.look()
        return asyncio.CancelledError() if job.is_withdrawn and not self._home.is_running() else None

    def look(self) -> None:
        """Where its home is gone, on which its end would be waited for, end it."""
        if not self._owner.orphaned or self.supervisor.inherited:
            return
        with self.supervisor.lock:
            was_lost, self._is_lost = self._is_lost, True
        if was_lost:
            return
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._task is not None and (serving := self._task.get_coro()) is not None:
            with contextlib.suppress(RuntimeError):  # of a transport, which asks its loop to close it
                serving.close()
        self.supervisor.ended(self, "the loop that started it is gone", None, can_follow=False)

    # ---- Its life

    def start(self) -> None:
        """Spawn the process. At home."""
        self._task = self._home.create_task(self._serve())
        self._task.add_done_callback(self._ended)  # comes also where it is cancelled before it began

    def _ended(self, task: "asyncio.Task[str]") -> None:
        if task.cancelled():  # by the end of its home: nothing else cancels this before it is to end
            self.supervisor.ended(self, "the loop that started it has ended", None, can_follow=False)
            return
        if (error := task.exception()) is not None:
            how, self._cause = f"it could not be started: {error}", error
        else:
            how = task.result()
        self.supervisor.ended(self, how, self._cause)

    async def _serve(self) -> str:
        ours, theirs = socket.socketpair()
        share_ours, share_theirs = socket.socketpair()
        door_ours, door_theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        door_ours.setblocking(False)
        with share_ours, door_ours as self._fd_channel, contextlib.ExitStack() as until_connected:
            until_connected.enter_context(ours)
            with theirs, share_theirs, door_theirs:
                self._process = process = self._spawn(theirs, share_theirs, door_theirs)
                self.process_id = process.pid
            link = self._link = Link(self._received)
            # A child that the process forked before it was a worker, as its main module may, keeps the link open.
            watch = ExitWatch(self._home, process, functools.partial(link.finish, ours))
            ours.setblocking(False)
            try:
                await self._home.create_unix_connection(lambda: link, sock=ours)
                until_connected.pop_all()  # it is the loop's now
                if not self.supervisor.inherited:
                    watch.start()
                with anyio.move_on_after(_START_S) as starting:
                    await self._begin(share_ours, link)
                if starting.cancelled_caught:
                    return f"it did not start within {duration(_START_S)}"
                await asyncio.wait([link.lost])
                with anyio.move_on_after(_EXIT_S):
                    while process.poll() is None:  # noqa: ASYNC110  (it is about to end, and nobody tells)
                        await asyncio.sleep(_POLL_S)
            finally:
                # In a child of a fork the process is the parent's, and so is what the kernel watches for both.
                if not self.supervisor.inherited:
                    watch.close()
                    if process.poll() is None:
                        process.kill()
                    process.wait()
                    link.abort()  # closing it would wait until the process has read what was sent
        return f"its process ended {_how(process.returncode)}"

    async def _begin(self, share: socket.socket, link: Link) -> None:
        """Until it is at work, or gone."""
        sharing: asyncio.Task[None] | None = None
        if self._shared is not None:
            share.setblocking(False)
            sharing = asyncio.create_task(self._shared.send(share))
        ready = asyncio.wrap_future(self.ready)
        try:
            await asyncio.wait([link.lost, ready], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            if sharing is not None:
                sharing.cancel()
                await asyncio.wait([sharing])
                error = sharing.exception() if not sharing.cancelled() else None
                # Where it went, the end of its process tells more.
                if error is not None and self._cause is None and not isinstance(error, BrokenResourceError):
                    self._cause = error

    def _spawn(self, *sockets: socket.socket) -> "subprocess.Popen[bytes]":
        """Start the process as multiprocessing starts those that it spawns, and have it run a `Spawned`.

        Not by a `multiprocessing.Process`: it stays one of this process's children in a child of a fork, too, whose
        end would be to terminate it; daemons may not make any; and at exit the others are waited for, as long as their
        calls take.
        """
        descriptors = [sock.fileno() for sock in sockets]
        preparation = multiprocessing.spawn.get_preparation_data(f"{self.supervisor.name}, worker {self.number}")
        preparation["authkey"] = bytes(preparation["authkey"])  # its type refuses pickle; nobody else reads
        spawned = Spawned(self.number, pickle.dumps(self._settings), *descriptors)
        with os.fdopen(os.memfd_create("aioverbs worker"), "r+b") as setup:  # a pipe might not take all of it at once
            setup.write(pickle.dumps(preparation) + pickle.dumps(spawned))
            setup.seek(0)
            # Ctrl-C is the pool's, from the first instruction of the process on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return subprocess.Popen(
                    multiprocessing.spawn.get_command_line(pipe_handle=setup.fileno()),
                    pass_fds=(*descriptors, setup.fileno()),
                    stdin=subprocess.DEVNULL,
                    env={name: value for name, value in os.environ.items() if name != "AIOVERBS_SOFT_ADDRESS"},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """Have it end."""
        self.at_home(self._ask_to_end)

    def _ask_to_end(self) -> None:
        if self.is_ready and self._link is not None:
            self._link.send(FrameType.STOP)
        else:
            self.kill()

    def kill(self) -> bool:
        """End it."""
        if self._process is not None:
            self._process.kill()
        elif self._task is not None:
            self._task.cancel()
        return True

    def join(self, timeout_s: float) -> bool:
        """It was waited for."""
        return True

    # ---- What is said

    def job(self, payload: object, outcome: ResultSink[Any]) -> PendingCall:
        """A call as `pickled_call` made it, or a visit."""
        visit = payload if isinstance(payload, SocketCall) else None
        data = visit.payload if visit is not None else payload
        assert isinstance(data, bytes)
        return _ProcessJob(self, data, outcome, visit)

    def send(self, job: _ProcessJob) -> None:
        """Say a call. At home; maybe under the crew's lock."""
        if job.is_withdrawn:
            self._home.call_soon(self.on_done, job, None, job.cancellation())
        elif job.visit is None:
            self._say(FrameType.CALL, job)
        else:
            self._visits.append(job)
            if len(self._visits) == 1:
                self._send_sockets()

    def _say(self, kind: FrameType, job: _ProcessJob) -> None:
        payload, job.payload = job.payload, b""
        if self._link is not None:
            self._sent[job.number] = job
            self._link.send(kind, job.number, payload)

    def _send_sockets(self) -> None:
        while self._visits:
            job = self._visits[0]
            assert job.visit is not None
            assert self._fd_channel is not None
            try:
                send_socket(self._fd_channel, job.visit.sock)
            except OSError as error:
                # Else it is gone, and that will be told of.
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):  # mostly EAGAIN: it has many
                    self._home.call_later(_AGAIN_S, self._send_sockets)
                return
            self._visits.popleft()
            job.visit.sock.close()
            self._say(FrameType.VISIT, job)

    def withdraw(self, job: _ProcessJob) -> None:
        """Say that a call is to be cancelled, if it was said. At home."""
        if job in self._visits:
            self._visits.remove(job)
            self.on_done(job, None, job.cancellation())
        elif job.number in self._sent and self._link is not None:
            self._link.send(FrameType.CANCEL, job.number)

    def _received(self, kind: FrameType, number: int, payload: bytes) -> None:
        if kind is FrameType.READY:
            ready: Ready = pickle.loads(payload)
            self.native = ready.native
            self.on_ready()
            return
        if kind is FrameType.FAILED:
            self._cause = unpickled_error(payload)
            return
        if kind is FrameType.NEWS:
            call = self._sent.get(number)  # a connection may outlive it by a moment
            if call is not None and call.visit is not None:
                call.visit.tell(bool(payload))
            return
        job = self._sent.pop(number)
        if kind is FrameType.CANCELLED:
            self.on_done(job, None, job.cancellation())
        elif kind is FrameType.ERROR:
            self.on_done(job, None, unpickled_error(payload))
        else:
            self._arrived(job, payload)

    def _arrived(self, job: _ProcessJob, payload: bytes) -> None:
        try:
            result = pickle.loads(payload)
        except Exception as error:
            error.add_note("what a worker process returned cannot be made here from its pickle")
            self.on_done(job, None, error)
        else:
            self.on_done(job, result, None)


def _how(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"
