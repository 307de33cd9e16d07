# Part of data_path.pyx: inboxes, which hand out received messages in the order of their arrival.

cdef extern from "Python.h":
    Py_ssize_t references "Py_REFCNT"(PyObject *object)  # takes an address: an object would be held for the call


@cython.final
cdef class Inbox:
    """Destination of completed receives: an asynchronous iterator over messages, for one task at a time. The method
    ``messages`` of a queue pair or shared receive queue returns it to the user.

    The iterator ends when the queue is closed. The error of the first failed receive is raised once and ends the
    iterator. No message is lost if a task is cancelled: the next await gets it.

    :param queue: queue that the receives are posted to.
    :param wrap: callable that turns a `Received` into the item to return; if it returns None, the message is dropped.
        An exception from it ends the iterator with a `BrokenResourceError` and breaks the queue pair.
    :param unused: callable that takes back the memory of each failed receive.
    """

    cdef WorkQueue queue
    cdef object wrap
    cdef object unused
    cdef object ready                   # deque of items that no await has taken yet; None before the first one
    cdef object end                     # exception that ended the iterator
    cdef object end_when_drained        # exception that ends the iterator after the last posted receive, or None
    cdef Py_ssize_t posted              # number of receives in flight
    cdef object __weakref__             # for the queue's list
    cdef Operation pending_next         # the await for the next message; None if there is none

    def __init__(self, WorkQueue queue not None, wrap, unused):
        self.queue = queue
        self.wrap = wrap
        self.unused = unused
        queue._add_inbox(self)

    def __len__(self):
        """Return the number of received messages that no await has taken yet."""
        ready = self.ready
        return len(ready) if ready is not None else 0   # a deque is consistent for every thread

    def __aiter__(self):
        """Return the inbox, which is its own iterator."""
        return self

    def __anext__(self):
        """Return an `Operation` that takes the next message.

        Awaiting the operation returns the item that ``wrap`` returned for the message. After the last message, awaiting
        raises StopAsyncIteration, or the exception that ended the iterator.

        :raises AffinityError: the caller is not on the thread and event loop that own the queue.
        :raises ClosedResourceError: the queue is destroyed, and the iterator has not ended.
        :raises ConcurrentAccessError: another thread is inside a verb of the same thread domain.
        :raises RuntimeError: another task is waiting for the next message.
        """
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            return self._begin_next()
        finally:
            section_leave(&within)

    cdef Operation _begin_next(self):
        # Do the work of `__anext__` in the section.
        cdef Operation operation
        if self.end is None:            # messages from before the end are still returned
            try:
                self.queue._enter()
            except BusyResourceError:   # another thread is changing the state of the caller's queue: no verb is called
                pass
            else:
                self.queue.handle._unuse()
        else:
            _check_owner(self.queue.handle)
        operation = _new(self.queue, 0, False)      # before the check: a finalizer may run, and begin an await
        _extra(operation).inbox = self
        self._drop_abandoned()
        if self.pending_next is not None:
            raise RuntimeError("another task is waiting for the next message: only one task at a time may read")
        operation.extra.awaits_message = True
        operation.state = POSTED
        self.pending_next = operation
        self._deliver_message()
        return operation

    cdef int _drop_abandoned(self) noexcept:
        # Forget the pending await if its caller has dropped it, so that only this reference is left.
        if self.pending_next is not None and references(<PyObject *>self.pending_next) == 1:
            self.pending_next = None
        return 0

    cdef int _deliver_message(self) except -1:
        # Complete the pending await, if there is one, with the oldest message, or with the end of the iterator.
        cdef Operation operation
        self._drop_abandoned()
        operation = self.pending_next
        if operation is None or (not self.ready and self.end is None):
            return 0
        self.pending_next = None
        if self.ready:
            operation.value = self.ready.popleft()
            operation.extra._hold_message(operation.value)
        else:
            operation._fail(self.end)
        byte_write(&operation.state, DONE)
        waiter = operation.waiter
        if waiter is not None:
            self.queue._count_awaited(-1)
            _wake(waiter, self.queue)
        return 0

    cdef int _receive_done(self, Operation operation, object local) except -1:
        # Handle a completed receive into the memory `local`: take its message, or give `local` back if it failed.
        self.posted -= 1
        if operation.raises or operation.status != SUCCESS:
            return self._receive_failed(operation, local)
        try:
            message = self.wrap(operation.value)
        except Exception as error:
            return self._wrap_failed(error)
        return self._add_message(message)

    cdef int _add_message(self, object message) except -1:
        # Take the message of a completed receive, which may be None.
        if message is not None:
            self._ready().append(message)
        if self.end_when_drained is not None and not self.posted and self.end is None:
            self.end = self.end_when_drained
        return self._deliver_message()

    cdef object _ready(self):
        # Return `ready`. An idle inbox has none, because an empty deque has room for 64 items.
        if self.ready is None:
            ready = collections.deque()             # may collect garbage: see `_return_message`
            if self.ready is None:
                self.ready = ready
        return self.ready

    cdef int _receive_failed(self, Operation operation, object local) except -1:
        # Give the memory `local` of a failed receive back, and end the iterator with the failure of the operation.
        try:
            self.unused(local)
        except Exception as error:
            return self._wrap_failed(error)
        if self.end is None:
            closed = self.queue.closing and (operation.status == FLUSHED or operation.raises)
            self.end = StopAsyncIteration() if closed else operation._failure()
        return self._deliver_message()

    cdef int _wrap_failed(self, object error) except -1:
        # Fail only this inbox, because `wrap` or `unused` raised `error`: an exception raised while completions are
        # dispatched would reach a task that awaits a different queue.
        cdef QpWorkState requests = self.queue.requests
        broken = BrokenResourceError(f"{self.queue.handle!r} is broken: handling a message raised {error!r}")
        broken.__cause__ = error
        if self.end is None:
            _log.error("%s", broken, exc_info=error)
            self.end = broken
        if requests is not None:
            requests._require_error(broken)
        return self._deliver_message()

    cdef int _queue_failed(self, object error) except -1:
        # The queue takes no more receives because of `error`. If receives are in flight, they still complete, and the
        # first one that fails ends the iterator; otherwise, end the iterator here.
        if self.posted:
            self.end_when_drained = error
        elif self.end is None:
            self.end = error
            return self._deliver_message()
        return 0

    cdef int _return_message(self, object message) except -1:
        # Take a message back from an operation that was dropped before its task got the message. This runs while the
        # operation is being freed, in any thread, so that a waiting task must be woken by its own loop. An await that
        # is not suspended yet gets the message here, which runs no other code.
        cdef Operation operation
        self._ready().appendleft(message)
        self._drop_abandoned()
        operation = self.pending_next
        if operation is None:
            return 0
        waiter = operation.waiter
        if waiter is None:
            return self._deliver_message()
        try:
            waiter.get_loop().call_soon_threadsafe(self._deliver_message_later)
        except RuntimeError:            # the loop is closed: no task waits there
            pass
        return 0

    def _deliver_message_later(self):
        """Complete the pending await, if there is one, with the oldest message, or with the end of the iterator if no
        message is left. This is called on the loop of the waiting task."""
        self._deliver_message()

    cdef int _withdraw(self, Operation operation) except -1:
        # Handle the cancellation of an await for a message: a message that it has taken goes back to the inbox.
        if self.pending_next is operation:
            self.pending_next = None
        else:
            message = operation.extra._take_message()
            if message is not None:
                self._ready().appendleft(message)
                return self._deliver_message()  # another task may have started an await since then
        return 0


# These functions are for the resources in the layers above, and not methods, because users can reach inboxes. If the
# owner of a queue is gone, another thread or loop may close the queue.

def close_inbox(Inbox inbox not None, error=None):
    """End an inbox: messages that have already arrived are still returned. Do nothing if it has ended before.

    :param inbox: the inbox.
    :param error: exception that is raised after the last message; None to end normally, with StopAsyncIteration.
    """
    cdef section within
    section_enter(&within, _section(inbox.queue))
    try:
        if inbox.end is None:
            inbox.end = error if error is not None else StopAsyncIteration()
            inbox._deliver_message()
    finally:
        section_leave(&within)


def empty_inbox(Inbox inbox not None):
    """Remove the messages that no await has taken yet from an inbox.

    :param inbox: the inbox.
    :returns: a list of these messages, oldest first, which no await will return.
    """
    cdef section within
    section_enter(&within, _section(inbox.queue))
    ready, inbox.ready = inbox.ready, None
    section_leave(&within)
    return list(ready) if ready is not None else []


def reopen_inbox(Inbox inbox not None):
    """Let an inbox that has ended receive messages again. Messages that no await has taken yet stay in it.

    :param inbox: the inbox.
    """
    cdef section within
    section_enter(&within, _section(inbox.queue))
    inbox.end = inbox.end_when_drained = None
    section_leave(&within)


def receive_into(requester, Inbox inbox not None, local):
    """Post a receive whose message goes to an inbox. The caller has made sure that the queue has a free place.

    :param requester: queue pair or shared receive queue to post to.
    :param inbox: inbox that gets the message.
    :param local: memory for the message, registered with ``LOCAL_WRITE``.
    :returns: the `Operation` of the receive, which need not be awaited: the inbox gets the result.
    :raises anyio.WouldBlock: the queue has no free place; nothing is posted. Other errors are those of the method
        ``receive`` of `requester`.
    """
    return requester._receive_into(inbox, local)


def post_receives(QueuePairVerbs requester not None, ReceiveRing ring not None, first, count):
    """Post consecutive receives of a ring.

    :param requester: queue pair to post to.
    :param ring: the ring.
    :param first: index of the first receive to post, none of which may be posted yet.
    :param count: number of receives to post.
    :raises anyio.WouldBlock: the queue has too few free places; nothing is posted.
    :raises IndexError: the ring has no such receives; nothing is posted.
    :raises VerbsError: ``ibv_post_recv`` failed; the receives before the refused one are posted. Other errors are those
        of `QueuePairVerbs.receive`.
    """
    requester._post_receives(ring, first, count)


def requester_of(QpWorkState requests not None):
    """Return a new `QueuePairVerbs` object that posts requests to a queue pair.

    It does not depend on the user's own object for the queue pair, which may be closed or dropped.

    :param requests: the queue pair's work state.
    """
    requester = QueuePairVerbs()
    requester._requests_begin(requests)
    return requester


cdef class Message(Received):
    """Received message, in memory that is posted again when the message is released.

    Release a message after reading it, using ``with`` or `release`: until then, no other message is received into its
    memory. Views of `data` that are kept after the release show later messages. A message that is dropped is released
    eventually. ``with message:`` provides the message and releases it at the end of the block.

    :param received: result of the receive.
    :param release: callable that takes the memory back; called once, by `release`.
    :param forgotten: callable that takes the memory back if the message is dropped before it is released; called in any
        thread. None to do nothing then.
    """

    cdef object _release
    cdef object _forgotten

    def __init__(self, Received received not None, release, forgotten):
        self.local = received.local
        self.byte_len = received.byte_len
        self.written = received.written
        self.src_qp = received.src_qp
        self.immediate = received.immediate
        self.invalidated_rkey = received.invalidated_rkey
        self.route = received.route
        self.qp_num = received.qp_num
        self._release = release
        self._forgotten = forgotten

    def release(self):
        """Give the memory back, so that it is posted again. Further calls do nothing. Afterwards, `data` is empty.

        If giving the memory back raises an exception, that propagates, the message keeps the memory, and `release` may
        be called again.
        """
        cdef section within
        section_enter(&within, <PyObject *>self)        # if several threads release it, only one gives the memory back
        release, self._release = self._release, None
        section_leave(&within)
        if release is None:
            return
        try:
            release(self.local)
        except BaseException:
            self._release = release
            raise
        self.local = None

    def __enter__(self):
        """Return this message."""
        return self

    def __exit__(self, kind, error, traceback):
        """Release the message; exceptions that `release` raises propagate. An exception from the block is not
        suppressed."""
        self.release()

    def __del__(self):
        if self._release is not None and self._forgotten is not None:
            self._forgotten(self.local)
