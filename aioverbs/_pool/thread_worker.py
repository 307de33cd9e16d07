"""Workers that are threads of this process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from aioverbs._lifecycle.cross_loop import CrossLoopCall, ResultSink
from aioverbs._pool.supervisor import Counts, PendingCall, Supervisor, WorkerHandle
from aioverbs._pool.worker import WorkerSettings, loop_factory, worker_context
from aioverbs._verbs.device import Device
from aioverbs._verbs.protection_domain import ProtectionDomain

__all__ = ["ThreadWorker"]


class _ThreadCall(PendingCall, CrossLoopCall[Any]):
    """Call that a worker thread executes."""

    __slots__ = ("handle", "is_cancelled_by_caller", "is_cancelled_by_pool")

    handle: "ThreadWorker"

    def __init__(
        self, handle: "ThreadWorker", function: Callable[..., Any], args: tuple[object, ...], outcome: ResultSink[Any]
    ) -> None:
        CrossLoopCall.__init__(self, function, args, outcome, handle)
        self.handle = handle
        self.is_cancelled_by_caller = self.is_cancelled_by_pool = False

    def post(self) -> None:
        """Send the call to the worker's loop. This can be called from any thread.

        :raises RuntimeError: the worker's loop is closed.
        """
        self.send_to(self.handle.loop)

    def revoke(self) -> None:
        """Cancel the call on the worker, or end the call here if the worker is not ready yet.

        This can be called from any thread. It has no effect if the call has ended.
        """
        self.is_withdrawn = True
        if self.handle.supervisor.withdraw_backlogged(self):
            return
        if self.handle.is_ready:
            self.loop = self.handle.loop  # for the next line: another thread may not have posted the call yet
            CrossLoopCall.withdraw(self)
        # Else the call has ended.

    def start(self) -> None:
        """Start the call, unless the worker's loop is ending. Call on that loop.

        :raises SystemExit: the function raised it; it is raised again here to end the loop. The same applies to
            `KeyboardInterrupt`.
        """
        if not self.handle.is_ending():
            super().start()

    def settle(self, result: object, error: BaseException | None) -> None:
        """Report the result or the exception of the call to the supervisor, unless the worker's loop is ending.

        :param result: result of the function, if `error` is None.
        :param error: exception that the call ended with; None if the function returned.
        """
        if not self.handle.is_ending():  # else the supervisor ends the call
            self.handle.on_done(self, result, error)

    def leave(self, error: BaseException) -> None:
        """Do nothing. This is called when the function ends the loop: the supervisor then ends the worker's calls.

        :param error: SystemExit or KeyboardInterrupt that the function raised.
        """


class ThreadWorker(WorkerHandle):
    """Worker thread with an event loop and a resource domain.

    The thread is a daemon, so a program that exits without closing the pool does not wait for it.

    :param supervisor: supervisor of the pool.
    :param number: number of the worker in its pool.
    :param counts: counts of the worker and of the workers that it replaces.
    :param device: device of the pool.
    :param pd: protection domain of the worker's domain.
    :param settings: settings of all workers.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        supervisor: Supervisor,
        number: int,
        counts: Counts,
        device: Device,
        pd: ProtectionDomain,
        settings: WorkerSettings,
    ) -> None:
        super().__init__(supervisor, number, counts)
        self._main_task: asyncio.Task[None] | None = None
        self._device = device
        self._pd = pd
        self._settings = settings
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"{supervisor.name}, worker {number}", daemon=True)
        self._stop: asyncio.Event | None = None

    def start(self) -> None:
        """Start the thread of the worker.

        :raises RuntimeError: no thread can be started.
        """
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended or the timeout has expired. Return at once if called in that thread.

        :param timeout_s: maximum time to wait, in seconds.
        :returns: True if the thread has ended or was never started; False if it is still running.
        """
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Run the worker's loop and report its end to the supervisor. This is the main function of the thread."""
        reason, cause = "it was stopped", None
        try:
            with asyncio.Runner(loop_factory=loop_factory(self._settings.loop)) as runner:
                runner.run(self._main())
        except BaseException as error:
            reason, cause = f"{error!r} stopped its event loop", error
        self.supervisor.on_worker_end(self, reason, cause)

    async def _main(self) -> None:
        """After a pause of `pause_s`, open the worker's domain and enter its setup, take calls until `stop` is called,
        then close everything.

        If `stop` was called before, return at once.

        :raises Exception: whatever entering or leaving `worker_context` raised.
        """
        self._main_task = asyncio.current_task()
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._is_stopping:
            return
        await asyncio.sleep(self.pause_s)
        async with worker_context(self.number, self._device, self._pd, self._settings, self.supervisor) as worker:
            self.native = worker.domain.native
            self.on_ready()
            await self._stop.wait()

    def is_ending(self) -> bool:
        """Return whether the loop is ending: its main task has ended or is being cancelled.

        True before the loop has started. Call on that loop.
        """
        task = self._main_task
        return task is None or task.cancelling() > 0 or task.done()

    def stop(self) -> None:
        """Tell the worker's loop to end, without waiting until it has ended. This can be called from any thread.

        A worker whose loop has not started ends as soon as the loop starts. A worker that pauses or is entering its
        setup is cancelled, once, because its setup may wait for ever.
        """
        self._is_stopping = True
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._end, self._stop)

    def _end(self, stop: asyncio.Event) -> None:
        """End the main task: set the event that it waits for, or cancel the task if it is not ready. Call on the loop.

        :param stop: event that the main task waits for when it is ready.
        """
        stop.set()
        task = self._main_task
        if not self.is_ready and task is not None and not task.cancelling():
            task.cancel()

    def kill(self) -> bool:
        """Return False, because a thread cannot be ended by force."""
        return False

    def make_call(self, payload: object, outcome: ResultSink[Any]) -> PendingCall:
        """Return a new call for this worker, which is not sent yet.

        :param payload: tuple ``(function, args)``.
        :param outcome: object that receives the result or the exception of the call.
        """
        assert isinstance(payload, tuple)
        function, args = payload
        return _ThreadCall(self, function, args, outcome)
