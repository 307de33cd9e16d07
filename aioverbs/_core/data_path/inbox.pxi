# Part of work.pyx: messages in the order of their arrival, for one who asks for them.

cdef extern from "Python.h":
    Py_ssize_t references "Py_REFCNT"(PyObject *object)  # by its address: an object would be held for the call


@cython.final
cdef class Inbox:
    """Where receives go when they are done: an asynchronous iterator, for one task at a time.

    It ends when the queue is closed. A receive that failed is raised, once, and nothing comes after it. Who is
    cancelled loses nothing: the next one gets what came.

    :param queue: that the receives are posted to.
    :param wrap: makes of what was `Received` what the iterator gives; None where it took that for itself. An error that
        it raises ends the iterator, and the queue pair, by a `BrokenResourceError`.
    :param unused: called with the memory of each receive that failed.
    """

    cdef WorkQueue queue
    cdef object wrap
    cdef object unused
    cdef object ready                   # deque of what came and was not asked for
    cdef object end                     # what ended it: an exception
    cdef object end_when_drained        # what ends it when the last of its receives is done: an exception, or None
    cdef Py_ssize_t posted              # receives that are not done
    cdef object __weakref__             # its queue's
    cdef Operation pending_next         # by who waits

    def __init__(self, WorkQueue queue not None, wrap, unused):
        self.queue = queue
        self.wrap = wrap
        self.unused = unused
        self.ready = collections.deque()
        queue._add_inbox(self)

    def __len__(self):
        """How many came and were not asked for."""
        return len(self.ready)          # a deque, which is whole for any thread

    def __aiter__(self):
        return self

    def __anext__(self):
        cdef section within
        section_enter(&within, _section(self.queue))
        try:
            return self._begin_next()
        finally:
            section_leave(&within)

    cdef Operation _begin_next(self):
        cdef Operation operation
        if self.end is None:            # what came before the end is still given
            try:
                self.queue._enter()
            except BusyResourceError:   # another thread changes the state of what is the caller's: no verb is called
                pass
            else:
                self.queue.handle._unuse()
        else:
            _check_owner(self.queue.handle)
        self._drop_abandoned()
        if self.pending_next is not None:
            raise RuntimeError("somebody waits for the next message already: one task at a time reads messages")
        operation = _new(self.queue, 0, False)
        _extra(operation).inbox = self
        operation.extra.awaits_message = True
        operation.state = POSTED
        self.pending_next = operation
        self._deliver_message()
        return operation

    cdef int _drop_abandoned(self) noexcept:
        # Who asked has dropped that: nobody but this holds it.
        if self.pending_next is not None and references(<PyObject *>self.pending_next) == 1:
            self.pending_next = None
        return 0

    cdef int _deliver_message(self) except -1:
        cdef Operation operation
        self._drop_abandoned()
        operation = self.pending_next
        if operation is None or (not self.ready and self.end is None):
            return 0
        self.pending_next = None
        if self.ready:
            operation.value = operation.extra.message = self.ready.popleft()
        else:
            operation._fail(self.end)
        byte_write(&operation.state, DONE)
        waiter = operation.waiter
        if waiter is not None:
            self.queue._count_awaited(-1)
            _wake(waiter, self.queue)
        return 0

    cdef int _receive_done(self, Operation operation, object local) except -1:
        # A receive is done.
        self.posted -= 1
        if not operation.raises and operation.status == SUCCESS:
            try:
                message = self.wrap(operation.value)
            except Exception as error:
                return self._wrap_failed(error)
            if message is not None:
                self.ready.append(message)
            if self.end_when_drained is not None and not self.posted and self.end is None:
                self.end = self.end_when_drained
            return self._deliver_message()
        try:
            self.unused(local)
        except Exception as error:
            return self._wrap_failed(error)
        if self.end is None:
            closed = self.queue.closing and (operation.status == FLUSHED or operation.raises)
            self.end = StopAsyncIteration() if closed else operation._failure()
        return self._deliver_message()

    cdef int _wrap_failed(self, object error) except -1:
        # Raised where completions are taken, it would reach whoever awaits another queue's. It ends this one alone.
        cdef QpWorkState requests = self.queue.requests
        broken = BrokenResourceError(f"{self.queue.handle!r} is broken: what arrived could not be taken in: {error!r}")
        broken.__cause__ = error
        if self.end is None:
            _log.error("%s", broken, exc_info=error)
            self.end = broken
        if requests is not None:
            requests._require_error(broken)
        return self._deliver_message()

    cdef int _queue_failed(self, object error) except -1:
        # Its queue takes no more receives, by that. Those that are posted still end, and the first that failed tells
        # of it; where there are none, nothing else would.
        if self.posted:
            self.end_when_drained = error
        elif self.end is None:
            self.end = error
            return self._deliver_message()
        return 0

    cdef int _return_message(self, object message) except -1:
        # Who was given it dropped it, in whatever thread. This is a part of freeing: whoever sleeps for a message is
        # woken by his own loop. Who does not sleep yet is given it here, and nothing runs for that.
        cdef Operation operation
        self.ready.appendleft(message)
        self._drop_abandoned()
        operation = self.pending_next
        if operation is None:
            return 0
        waiter = operation.waiter
        if waiter is None:
            return self._deliver_message()
        try:
            waiter.get_loop().call_soon_threadsafe(self._deliver_message_later)
        except RuntimeError:            # the loop is closed: nobody sleeps there any more
            pass
        return 0

    def _deliver_message_later(self):
        self._deliver_message()

    cdef int _withdraw(self, Operation operation) except -1:
        # Who asked is cancelled.
        if self.pending_next is operation:
            self.pending_next = None
        elif operation.extra.message is not None:
            self.ready.appendleft(operation.extra.message)
            operation.extra.message = None
            return self._deliver_message()  # somebody else may have asked meanwhile
        return 0


# For the resources above, not for users, who have inboxes, too. Whoever closes a queue may be another than its owner,
# where that is gone.

def close_inbox(Inbox inbox not None, error=None):
    """No more receives will come: the iterator ends after those that did, by that error if there is one."""
    cdef section within
    section_enter(&within, _section(inbox.queue))
    try:
        if inbox.end is None:
            inbox.end = error if error is not None else StopAsyncIteration()
            inbox._deliver_message()
    finally:
        section_leave(&within)


def empty_inbox(Inbox inbox not None):
    """Take what came and was not asked for: a list, which nobody else gets."""
    cdef section within
    section_enter(&within, _section(inbox.queue))
    ready, inbox.ready = inbox.ready, collections.deque()
    section_leave(&within)
    return list(ready)


def reopen_inbox(Inbox inbox not None):
    """Receives come again."""
    cdef section within
    section_enter(&within, _section(inbox.queue))
    inbox.end = inbox.end_when_drained = None
    section_leave(&within)


def receive_into(requester, Inbox inbox not None, local):
    """Post a receive whose message goes to an inbox, to a queue pair or shared receive queue that has a place."""
    return requester._receive_into(inbox, local)


def requester_of(QpWorkState requests not None):
    """What posts to a queue pair apart from the user's object."""
    requester = QueuePairVerbs()
    requester._requests_begin(requests)
    return requester


cdef class Message(Received):
    """What arrived, in memory that goes back to be received into when it is released.

    Release it, by ``with`` or `release`, when you have read it: what is kept is not received into. Views of `data` that
    are kept longer show what came later. One that is forgotten is released by and by.

    :param received: what arrived.
    :param release: called once with its memory, by `release`.
    :param forgotten: called with it instead, from whatever thread, where the message is forgotten.
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
        """Give its memory back; once is enough."""
        cdef section within
        section_enter(&within, <PyObject *>self)        # one thread of several that release it gives it back
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
        return self

    def __exit__(self, kind, error, traceback):
        self.release()

    def __del__(self):
        if self._release is not None and self._forgotten is not None:
            self._forgotten(self.local)
