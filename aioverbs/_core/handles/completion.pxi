# Part of handles.pyx: completion channels and completion queues.

cdef class CompletionChannel(Handle):
    """Completion channel (``ibv_create_comp_channel``). Its file descriptor is non-blocking.

    :param context: the device.
    :param affinity: owner of the channel; None if any thread may use it.
    :raises ClosedResourceError: the context is closed.
    :raises AffinityError: the caller is not the owner of the new channel.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner.
    :raises VerbsError: the verb failed; with EMFILE if no file descriptor is left; with ENOMEM if memory ran out.
    """

    def __init__(self, Context context not None, *, Affinity affinity=None):
        self._begin()
        self._enter_owner(affinity, "ibv_create_comp_channel")
        try:
            self._create(context)
        finally:
            self._leave_owner()

    cdef int _create(self, Context context) except -1:
        cdef int error = 0
        context._enter()
        self.context = context
        try:
            with nogil:
                self.pointer = context.table.create_comp_channel(context.pointer)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_create_comp_channel", error)
            flags = fcntl.fcntl(self.pointer.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.pointer.fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            self._opened(f"fd {self.pointer.fd}")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            context._leave()
            raise
        return 0

    cdef str _destroy_name(self):
        return "ibv_destroy_comp_channel"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_comp_channel(self.pointer)
        return error

    cdef int _drop_after_lender(self) except -1:
        # The descriptor is this process's own, and stays open when the lender closes the context.
        os.close(self.pointer.fd)
        return 0

    cdef void _leave_parents(self) noexcept:
        self.context._leave()

    def fileno(self):
        """Return the channel's file descriptor, which is readable while an event is waiting. The caller must not close
        it.

        :raises ClosedResourceError: the channel is closed.
        """
        self._enter_memory()
        try:
            return self.pointer.fd
        finally:
            self._leave()

    def get_event(self):
        """Take the next event of the channel, without waiting (``ibv_get_cq_event``).

        The caller must acknowledge each event with `CompletionQueue.ack_events`: until then, the queue that raised the
        event cannot be destroyed.

        :returns: the `CompletionQueue` that raised the event; None if no event is waiting.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the channel is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises VerbsError: the verb failed.
        """
        cdef ibv_cq *cq = NULL
        cdef void *handle = NULL
        cdef CompletionQueue queue
        cdef int error
        self._use("ibv_get_cq_event")
        try:
            while True:
                if self.context.table.get_cq_event(self.pointer, &cq, &handle):
                    error = errno
                    if error == EAGAIN:
                        return None
                    raise VerbsError("ibv_get_cq_event", error)
                # The cq_context of a queue is its handle. The ledger keeps the handle alive until the destroying verb
                # has returned, and that verb waits for this event.
                queue = <CompletionQueue>handle
                if gate_enter(&queue._gate):  # left by ack_events
                    gate_enter(&queue._unacknowledged)
                    return queue
                self.context.table.ack_cq_events(cq, 1)
        finally:
            self._unuse()


cdef class CompletionQueue(Handle):
    """Completion queue, created with ``ibv_create_cq``, or with ``ibv_create_cq_ex`` if `extended`, `parent_domain` or
    `single_threaded` is used.

    A completion that arrives when the queue is full is lost and breaks the queue permanently. The device then raises
    the asynchronous event ``EventType.CQ_ERR``, and ``EventType.QP_FATAL`` for the queue pair of the completion.

    :param context: the device.
    :param cqe: minimum capacity in completions; the property `cqe` has the actual one.
    :param channel: completion channel for its events; None if it raises none.
    :param comp_vector: completion vector of its events, 0..num_comp_vectors-1.
    :param extended: whether to poll with ``ibv_start_poll`` and related functions instead of ``ibv_poll_cq``.
    :param parent_domain: parent domain that provides locks and memory; None if there is none.
    :param single_threaded: whether the queue takes no lock (``IBV_CREATE_CQ_ATTR_SINGLE_THREADED``).
    :param affinity: owner of the queue; None for the owner of the other arguments. If these have none either, any
        thread may use the queue.
    :raises ValueError: `cqe` is less than 1, or an argument belongs to another context or another owner.
    :raises ClosedResourceError: an argument is closed.
    :raises AffinityError: the caller is not the owner of the new queue.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner, or of the same thread domain.
    :raises VerbsError: the verb failed; with EINVAL if the device has no queue of that size or no such vector; with
        EOPNOTSUPP if the provider lacks a feature; also if a parent domain's allocator failed: its exception is then
        the cause, or propagates unchanged if it is not an `Exception`.
    """

    def __init__(
        self,
        Context context not None,
        int cqe,
        CompletionChannel channel=None,
        *,
        int comp_vector=0,
        bint extended=False,
        ProtectionDomain parent_domain=None,
        bint single_threaded=False,
        Affinity affinity=None,
    ):
        self._begin()
        if cqe < 1:
            raise ValueError(f"`cqe` must be at least 1, got {cqe}")
        for part in (channel, parent_domain):
            if part is not None and (<Handle>part).context is not context:
                raise ValueError(f"{part!r} belongs to a different context than {context!r}")
        use_ex = extended or single_threaded or parent_domain is not None
        verb = "ibv_create_cq_ex" if use_ex else "ibv_create_cq"
        self._enter_owner(_common_owner((channel, parent_domain), affinity), verb)
        try:
            self._create(context, cqe, channel, comp_vector, extended, parent_domain, single_threaded, verb)
        finally:
            self._leave_owner()

    def _create(
        self, context, cqe, channel, int comp_vector, bint extended, ProtectionDomain parent_domain,
        bint single_threaded, str verb,
    ):
        """Create the queue with `verb`, which names the function, and count it as a user of its context, channel and
        parent domain. If that fails, these are left unchanged.

        :raises VerbsError: the verb failed.
        :raises ClosedResourceError: the context, the channel or the parent domain is closed.
        """
        cdef int error = 0
        use_ex = verb == "ibv_create_cq_ex"
        held = _enter_all((context, channel, parent_domain))
        self.context = context
        self.channel = channel
        self.parent_domain = parent_domain
        try:
            if use_ex:
                error = self._create_extended(context, cqe, channel, comp_vector, parent_domain, single_threaded)
            else:
                error = self._create_basic(context, cqe, channel, comp_vector)
            if not self.pointer:
                cause = parent_domain._take_cause() if parent_domain is not None else None
                raise self._verb_error(verb, error, cause)
            if not extended:
                self.extended_pointer = NULL
            self._opened("")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            _leave_all(held)
            raise

    def _create_basic(self, Context context, int cqe, CompletionChannel channel, int comp_vector):
        """Call ``ibv_create_cq`` and set `pointer`, to NULL on failure. Return errno, which is valid only on
        failure."""
        cdef int error
        cdef ibv_comp_channel *channel_pointer = channel.pointer if channel is not None else NULL
        with nogil:
            self.pointer = context.table.create_cq(context.pointer, cqe, <void *>self, channel_pointer, comp_vector)
            error = errno
        return error

    def _create_extended(
        self, Context context, int cqe, CompletionChannel channel, int comp_vector, ProtectionDomain domain, bint single
    ):
        """Call ``ibv_create_cq_ex`` and set `pointer` and `extended_pointer`, to NULL on failure. Return errno, which
        is valid only on failure."""
        cdef v.ibv_cq_init_attr_ex attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        attr.cqe = cqe
        attr.cq_context = <void *>self
        attr.channel = channel.pointer if channel is not None else NULL
        attr.comp_vector = comp_vector
        attr.wc_flags = (
            v.IBV_WC_EX_WITH_BYTE_LEN | v.IBV_WC_EX_WITH_IMM | v.IBV_WC_EX_WITH_QP_NUM | v.IBV_WC_EX_WITH_SRC_QP
        )
        if single:
            attr.comp_mask |= v.IBV_CQ_INIT_ATTR_MASK_FLAGS
            attr.flags = v.IBV_CREATE_CQ_ATTR_SINGLE_THREADED
        if domain is not None:
            attr.comp_mask |= v.IBV_CQ_INIT_ATTR_MASK_PD
            attr.parent_domain = domain.pointer
        with nogil:
            self.extended_pointer = v.verbs_create_cq_ex(context.pointer, &attr)
            error = errno
        self.pointer = <ibv_cq *>self.extended_pointer
        return error

    cdef str _destroy_name(self):
        return "ibv_destroy_cq"

    cdef bint _refuses_overlap(self) noexcept:
        return True

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_cq(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.context._leave()
        if self.channel is not None:
            self.channel._leave()
        if self.parent_domain is not None:
            self.parent_domain._leave()

    cdef str _users(self):
        if self._unacknowledged:
            return f"{self._unacknowledged} of its events were not acknowledged"
        return Handle._users(self)

    @property
    def cqe(self):
        """Actual capacity in completions, which is at least the requested one.

        :raises ClosedResourceError: the queue is closed.
        """
        self._enter()
        try:
            return self.pointer.cqe
        finally:
            self._leave()

    def resize(self, int cqe):
        """Change the capacity (``ibv_resize_cq``). Completions stay in the queue. Return None; `cqe` has the new
        capacity.

        :param cqe: minimum capacity in completions, 1..2**31-1.
        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises ValueError: `cqe` is less than 1.
        :raises VerbsError: with EINVAL if the queue holds more completions than `cqe`, or the device has no queue of
            that size; also if a parent domain's allocator failed: its exception is then the cause, or propagates
            unchanged if it is not an `Exception`. The queue is unchanged.
        """
        cdef int error
        if cqe < 1:
            raise ValueError(f"`cqe` must be at least 1, got {cqe}")
        self._use("ibv_resize_cq")
        gate_enter(&self._resizing)
        try:
            with nogil:
                error = self.context.table.resize_cq(self.pointer, cqe)
        finally:
            gate_leave(&self._resizing)
            self._unuse()
        if error and self.parent_domain is not None:
            cause = self.parent_domain._take_cause()
            if cause is not None:
                raise self._verb_error("ibv_resize_cq", abs(error), cause)
        self._check("ibv_resize_cq", error)

    def modify(self, uint16_t moderate_count, uint16_t moderate_period_us):
        """Moderate the events of the queue, so that several completions raise one event (``ibv_modify_cq``).

        An event is raised after a number of completions, or when a time has passed since the first of them.

        :param moderate_count: number of completions, 0..65535; 0 ends moderation.
        :param moderate_period_us: time in microseconds, 0..65535; 0 ends moderation.
        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises OverflowError: an argument is out of range.
        :raises VerbsError: with EOPNOTSUPP if the provider does not support moderation.
        """
        cdef v.ibv_modify_cq_attr attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        attr.attr_mask = v.IBV_CQ_ATTR_MODERATE
        attr.moderate.cq_count = moderate_count
        attr.moderate.cq_period = moderate_period_us
        self._use("ibv_modify_cq")
        try:
            with nogil:
                error = v.verbs_modify_cq(self.pointer, &attr)
        finally:
            self._unuse()
        self._check("ibv_modify_cq", error)

    def request_notify(self, bint solicited_only=False):
        """Request one event for the next completion that is added (``ibv_req_notify_cq``).

        :param solicited_only: True for the next completion that the sender marked with ``SendFlags.SOLICITED``, or that
            failed; False for the next completion of any kind.
        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises VerbsError: with EINVAL if the queue has no channel.
        """
        self._use("ibv_req_notify_cq")
        try:
            self._check("ibv_req_notify_cq", v.verbs_req_notify_cq(self.pointer, solicited_only))
        finally:
            self._unuse()

    def ack_events(self, int count=1):
        """Acknowledge events that `CompletionChannel.get_event` returned (``ibv_ack_cq_events``).

        :param count: number of events of this queue to acknowledge.
        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises ValueError: `count` is negative, or exceeds the number of events that were taken and not acknowledged;
            nothing is done.
        """
        self._use_memory("ibv_ack_cq_events")
        try:
            if count < 0 or not gate_leave_many(&self._unacknowledged, count):
                raise ValueError(f"{self!r} has {self._unacknowledged} unacknowledged events, got a `count` of {count}")
            self.context.table.ack_cq_events(self.pointer, count)
            gate_leave_many(&self._gate, count)
        finally:
            self._unuse()
