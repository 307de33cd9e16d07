"""State of a message channel, which its sender and its receiver share, and the end of both."""

from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol

from aioverbs._connection.wire import FrameKind
from aioverbs._lifecycle.affinity import Affinity, CrossLoopCondition, running_loop
from aioverbs._verbs.qp_modify import fail_now
from aioverbs._verbs.queue_pair import QueuePair, qp_work_state_of
from aioverbs.errors import (
    AffinityError,
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    DeviceRemovedError,
    VerbsError,
    WorkCompletionError,
)
from aioverbs.types import WcStatus

__all__ = ["Announcement", "ChannelState", "ChannelUser"]

Announcement = Awaitable[Callable[[], Awaitable[None]] | None]
"""Awaitable that announces a message. Its result is a function to await after the lock of the sender is released, or
None if the message has to be sent in fragments. See `Announcer.announce`."""

# Statuses of requests that failed with the connection, and not by themselves.
_ENDED_BY_CONNECTION = {WcStatus.WR_FLUSH_ERR, WcStatus.RETRY_EXC_ERR, WcStatus.RNR_RETRY_EXC_ERR}


class ChannelUser(Protocol):
    """User of a message channel: one end of a connection."""

    def on_control(self, kind: FrameKind, number: int, data: bytes) -> None:
        """Handle a control message of the peer that does not concern messages.

        :param kind: kind of the message.
        :param number: number in its header.
        :param data: its bytes.
        :raises ValueError: the message violates the protocol.
        """

    def announce(self, parts: list[memoryview], immediate: int | None) -> Announcement:
        """Announce a message. The caller holds the lock of the sender.

        :param parts: the message.
        :param immediate: the user's immediate data; None for none.
        """

    def announce_now(self, parts: list[memoryview], immediate: int | None, is_constant: bool) -> bool:
        """Announce a message if that needs no waiting, neither now nor until the peer has read it. The caller has
        checked that no sender has the lock or waits for it, and that there are credits.

        :param parts: the message.
        :param immediate: the user's immediate data; None for none.
        :param is_constant: whether its memory does not change until the peer has read it.
        :returns: whether the message was announced. If not, nothing was done.
        """

    def on_ended(self) -> None:
        """Handle that the channel has broken or is being closed. A broken channel that is closed calls this twice."""


class ChannelState:
    """Whether a message channel is open, broken or closed, and which end has said that it sends no more.

    Callers of the channel have to be on the owner's event loop, because neither the credits nor asyncio's locks are
    thread-safe.

    :param qp: queue pair of type RC.
    :param owner: owner of the connection, even if any loop may use the queue pair.
    :param user: user of the channel.
    """

    __slots__ = (
        "_ended",
        "broken",
        "closed",
        "discards",
        "eof_received",
        "eof_sent",
        "label",
        "loop",
        "owner",
        "qp",
        "receive_queue",
        "user",
    )  # fmt: skip

    def __init__(self, qp: QueuePair, owner: Affinity, user: ChannelUser) -> None:
        self.qp = qp
        self.owner = owner
        self.user = user
        self.label = "with its peer"
        self.broken: BrokenResourceError | None = None
        self.closed = False
        self.eof_received = False  # the peer sends no more user messages
        self.eof_sent = False
        self.discards = False  # this end is closing: it receives no more user messages
        self.loop = running_loop()
        work = qp_work_state_of(qp)
        assert work is not None
        assert work.receive_queue is not None
        self.receive_queue = work.receive_queue
        work.explain_failures(self._explain)
        work.require_sends()
        self._ended: CrossLoopCondition | None = None  # notified when the channel breaks or is closed

    def __repr__(self) -> str:
        return f"<Connection {self.label}>"

    def check_caller(self, operation: str) -> None:
        """Check that the owner's event loop is running.

        :param operation: name of the caller's method, for the error message.
        :raises AffinityError: another event loop or none is running in this thread.
        :raises ForkedProcessError: the connection was made in the process that this one was forked from.
        """
        self.owner.check(self, operation)

    def _report_end(self) -> None:
        """Wake the callers of `wait_broken`, then call `ChannelUser.on_ended`, which may raise."""
        if self._ended is not None:
            self._ended.notify()
        self.user.on_ended()

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Mark the channel as broken, fail all waiting callers and move the queue pair to ERR.

        Only the first call has an effect. Waiting and later callers of other methods get a `BrokenResourceError`, or a
        `DeviceRemovedError` if `cause` is one: see `closed_error`.

        :param reason: text for the message of that exception.
        :param cause: exception that caused the failure, which no call raises; None if there is none.
        """
        if self.broken is not None:
            return
        self.broken = self._broken_error(reason, cause)
        try:
            self._report_end()
        finally:
            self._end_queue_pair()

    def _broken_error(self, reason: str, cause: BaseException | None) -> BrokenResourceError:
        """Return a new exception that says why the channel is broken: see `fail`."""
        kind = DeviceRemovedError if isinstance(cause, DeviceRemovedError) else BrokenResourceError
        error = kind(f"the connection {self.label} is broken: {reason}")
        error.__cause__ = cause
        return error

    def fail_queue_pair(self, error: Exception | None) -> None:
        """Fail the channel because its queue pair has failed, unless the channel is broken or closed.

        :param error: exception with which a request ended; the cause, unless the queue pair has recorded an earlier
            one. None if there is no such exception.
        """
        if self.broken is None and not self.closed:
            work = qp_work_state_of(self.qp)
            cause = (work.broken if work is not None else None) or error
            self.fail(f"{cause or 'its queue pair is in the error state'}", cause)

    def _explain(self, error: WorkCompletionError) -> Exception:
        """Return the exception that a failed request of the connection raises. This is called in any thread.

        A request that the peer's device refused keeps its own error. All others ended because the peer is gone, or
        because the queue pair had failed before or was closed. Only the owner can fail the channel, which it does when
        the receives are flushed; in another thread, the error of the request itself is the cause until then.

        :param error: error of the request.
        """
        if error.status not in _ENDED_BY_CONNECTION:
            return error
        if self.owner.owns():
            self.fail_queue_pair(error)
        elif self.broken is None and not self.closed:
            return self._broken_error(str(error), error)
        return self.closed_error()

    def _end_queue_pair(self) -> None:
        """Move the queue pair to ERR, unless it is broken or closed. If a thread is inside a verb, do so later.

        This is called after all waiting callers were notified, so a delay does no harm. Errors are ignored.
        """
        try:
            work = qp_work_state_of(self.qp)
            if work is not None and work.broken is None:
                fail_now(self.qp)
        except ConcurrentAccessError:  # a thread is inside a verb on the unlocked domain: retry soon
            self.loop.call_soon(self._end_queue_pair)
        except BusyResourceError:  # a modify is in flight in a thread: retry after it
            self.receive_queue.when_resumed(self.loop, self._end_queue_pair)
        except (ClosedResourceError, VerbsError, AffinityError):
            return  # closed, or the device is gone, or another loop took over after this one was closed

    def close(self) -> None:
        """Close the channel from this end, and fail all waiting callers with `ClosedResourceError`.

        The queue pair stays open: the connection's lifecycle closes it next.
        """
        self.closed = True
        self._report_end()

    async def wait_broken(self) -> BrokenResourceError:
        """Wait until the channel breaks, and return the exception that `fail` set.

        :raises ClosedResourceError: the channel is closed.
        """
        if self._ended is None:
            self._ended = CrossLoopCondition()
        await self._ended.wait_while(lambda: self.broken is None and not self.closed)
        first = self.first_cause()
        if first is None:
            raise self.closed_error()
        return first

    def first_cause(self) -> BrokenResourceError | None:
        """Return the exception that `fail` set, without the traceback that raising it gave it; None if there is none.

        That traceback would keep the objects of the callers, the connection among them, as long as the channel exists.
        """
        return self.broken and self.broken.with_traceback(None)

    def closed_error(self) -> Exception:
        """Return a new exception for a call on a channel that is closed or broken.

        Each call gets one of its own: the traceback of a common one would grow with each call, and keep the objects of
        all callers.

        :returns: an exception of the same class and with the same text as the one that `fail` set, which is its cause;
            a `ClosedResourceError` if this end has closed the channel, or if `fail` was never called.
        """
        if self.closed or self.broken is None:
            return ClosedResourceError("the connection was closed")
        error = type(self.broken)(str(self.broken))
        error.__cause__ = self.first_cause()
        return error

    def raise_ended(self, error: Exception) -> NoReturn:
        """Raise the exception for calls on a channel that is closed or broken, instead of another one.

        :param error: exception with which a request or the inbox has ended for that reason. If the channel is neither
            broken nor closed, this fails it. The traceback is removed, because a request that was awaited, and the
            inbox, keep their exception.
        :raises Exception: the same as `closed_error` returns.
        """
        error.__traceback__ = None
        if isinstance(error, BrokenResourceError | WorkCompletionError):
            self.fail_queue_pair(error)
        raise self.closed_error()

    def check_usable(self) -> None:
        """Check that the channel is neither broken nor closed.

        :raises BrokenResourceError: the channel is broken.
        :raises ClosedResourceError: the channel is closed.
        """
        if self.broken is not None or self.closed:
            raise self.closed_error()

    def check_sending(self) -> None:
        """Check that user messages and grants can still be sent.

        :raises ClosedResourceError: END was sent, or the channel is closed.
        :raises BrokenResourceError: the channel is broken.
        """
        if self.eof_sent:
            raise ClosedResourceError("send_eof() was called: no more messages or grants can be sent")
        self.check_usable()

    def poll(self) -> bool:
        """Process the completions that have arrived, so that received messages are handled.

        :returns: False if nothing was processed because another thread is inside a verb on the unlocked domain: the
            caller has to retry; else True, even if the completion queue has failed.
        """
        dispatcher = self.receive_queue.dispatcher
        if dispatcher is not None and dispatcher.watched:
            try:
                dispatcher.drain()
            except ConcurrentAccessError:
                return False
            except VerbsError:
                return True  # no more completions come
        return True
