# Part of handles.pyx: completion channels and completion queues.

cdef class CompletionChannel(Handle):
    """A completion channel: ``ibv_create_comp_channel``. Its descriptor is non-blocking.

    :raises VerbsError: with EMFILE or ENOMEM.
    """

    def __init__(self, Context context not None, *, Affinity affinity=None):
        self._begin()
        self._belong(affinity, "ibv_create_comp_channel")
        try:
            self._create(context)
        finally:
            self._belongs()

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

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_comp_channel(self.pointer)
        return error

    cdef int _forgo(self) except -1:
        os.close(self.pointer.fd)
        return 0

    cdef void _leave_parents(self) noexcept:
        self.context._leave()

    def fileno(self):
        """The file descriptor, readable while an event waits."""
        self._enter_memory()
        try:
            return self.pointer.fd
        finally:
            self._leave()

    def get_event(self):
        """Take an event: the completion queue that it is for, or None where none waits: ``ibv_get_cq_event``.

        Each one is to be acknowledged by `CompletionQueue.ack_events` before the queue can be destroyed.
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
                # The context of a queue is its handle. The ledger keeps it until the verb that destroys the queue has
                # returned, and that waits for this event.
                queue = <CompletionQueue>handle
                if gate_enter(&queue._gate):  # left by ack_events
                    gate_enter(&queue._unacknowledged)
                    return queue
                self.context.table.ack_cq_events(cq, 1)
        finally:
            self._unuse()


cdef class WorkCompletion:
    """A completion: ``struct ibv_wc``. On an error only `wr_id`, `status`, `vendor_err` and `qp_num` mean anything.

    `imm_data` comes with ``WcFlags.WITH_IMM``, `invalidated_rkey` with ``WcFlags.WITH_INV``, both in host order; 0
    without. `completion_timestamp`, in the device's own ticks (of the software device: ``time.monotonic_ns``), is None
    where the queue was not made with timestamps. `byte_len` counts the 40 bytes before a datagram, too.
    """

    def __init__(self):
        raise TypeError("completions come from CompletionQueue.poll")

    def __repr__(self):
        return f"<WorkCompletion {self.wr_id:#x}: {self.status.name}, queue pair {self.qp_num}>"


cdef object _statuses = {int(status): status for status in WcStatus}


cdef class CompletionQueue(Handle):
    """A completion queue: ``ibv_create_cq``, or ``ibv_create_cq_ex`` where `extended` or a keyword after it is given.

    A completion that finds no room is lost and breaks the queue for good: that raises ``EventType.CQ_ERR``, and
    ``EventType.QP_FATAL`` of the queue pair whose completion it was.

    :param cqe: how many completions it holds at least; `cqe` tells how many it does.
    :param channel: where its events arrive.
    :param comp_vector: which of the context's `num_comp_vectors` raises them.
    :param extended: poll by ``ibv_start_poll`` and its relatives instead of by ``ibv_poll_cq``.
    :param parent_domain: takes locks and memory from there.
    :param single_threaded: takes no lock (``IBV_CREATE_CQ_ATTR_SINGLE_THREADED``).
    :param timestamps: completions carry the device's time; this needs, and implies, `extended`.
    :raises ValueError: `cqe` is less than 1, or a part is of another context.
    :raises VerbsError: with EINVAL where the device has no queue of that size or no such vector, with what a parent
        domain's allocator led to (what it raised is the cause), with EOPNOTSUPP where the provider lacks something.
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
        bint timestamps=False,
        Affinity affinity=None,
    ):
        self._begin()
        if cqe < 1:
            raise ValueError(f"a completion queue holds 1 completion at least, not {cqe}")
        for part in (channel, parent_domain):
            if part is not None and (<Handle>part).context is not context:
                raise ValueError(f"{part!r} is of another context")
        extended = extended or timestamps
        use_ex = extended or single_threaded or parent_domain is not None
        verb = "ibv_create_cq_ex" if use_ex else "ibv_create_cq"
        self._belong(_common((channel, parent_domain), affinity), verb)
        try:
            self._create(context, cqe, channel, comp_vector, extended, parent_domain, single_threaded, timestamps, verb)
        finally:
            self._belongs()

    def _create(
        self, context, cqe, channel, int comp_vector, bint extended, ProtectionDomain parent_domain,
        bint single_threaded, bint timestamps, str verb,
    ):
        cdef int error = 0
        use_ex = verb == "ibv_create_cq_ex"
        held = _enter_all((context, channel, parent_domain))
        self.context = context
        self.channel = channel
        self.parent_domain = parent_domain
        self._timestamps = timestamps
        try:
            if use_ex:
                error = self._create_extended(context, cqe, channel, comp_vector, parent_domain, single_threaded)
            else:
                error = self._create_basic(context, cqe, channel, comp_vector)
            if not self.pointer:
                cause = parent_domain._take_cause() if parent_domain is not None else None
                raise self._failed_by(verb, error, cause)
            if not extended:
                self.extended_pointer = NULL
            self._opened("")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            _leave_all(held)
            raise

    def _create_basic(self, Context context, int cqe, CompletionChannel channel, int comp_vector):
        cdef int error
        cdef ibv_comp_channel *channel_pointer = channel.pointer if channel is not None else NULL
        with nogil:
            self.pointer = context.table.create_cq(context.pointer, cqe, <void *>self, channel_pointer, comp_vector)
            error = errno
        return error

    def _create_extended(
        self, Context context, int cqe, CompletionChannel channel, int comp_vector, ProtectionDomain domain, bint single
    ):
        cdef v.ibv_cq_init_attr_ex attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        attr.cqe = cqe
        attr.cq_context = <void *>self
        attr.channel = channel.pointer if channel is not None else NULL
        attr.comp_vector = comp_vector
        attr.wc_flags = (
            v.IBV_WC_EX_WITH_BYTE_LEN | v.IBV_WC_EX_WITH_IMM | v.IBV_WC_EX_WITH_QP_NUM | v.IBV_WC_EX_WITH_SRC_QP
            | v.IBV_WC_EX_WITH_SLID | v.IBV_WC_EX_WITH_SL
        )
        if self._timestamps:
            attr.wc_flags |= v.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
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

    cdef bint _has_driver_half(self) noexcept:
        return True

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
        """How many completions it holds."""
        self._enter()
        try:
            return self.pointer.cqe
        finally:
            self._leave()

    def resize(self, int cqe):
        """Change how many completions it holds at least: ``ibv_resize_cq``. Those that are in it stay.

        :raises ValueError: `cqe` is less than 1.
        :raises VerbsError: with EINVAL where there are more completions in it than that, or more than the device can
            have; with what a parent domain's allocator led to (what it raised is the cause). The queue is as it was.
        """
        cdef int error
        if cqe < 1:
            raise ValueError(f"a completion queue holds 1 completion at least, not {cqe}")
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
                raise self._failed_by("ibv_resize_cq", abs(error), cause)
        self._check("ibv_resize_cq", error)

    def modify(self, uint16_t moderate_count, uint16_t moderate_period_us):
        """Moderate its events: ``ibv_modify_cq``.

        An event comes after so many completions, or so long after the first of them. 0 for either ends it.

        :param moderate_count: completions, up to 65535.
        :param moderate_period_us: microseconds, up to 65535.
        :raises OverflowError: one of them is larger, or negative.
        :raises VerbsError: with EOPNOTSUPP where the provider cannot.
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
        """Ask for one event, at the next completion that is added: ``ibv_req_notify_cq``.

        :param solicited_only: at the next one that its sender marked by ``SendFlags.SOLICITED``, or that is an error.
        :raises VerbsError: with EINVAL where the queue has no channel.
        """
        self._use("ibv_req_notify_cq")
        try:
            self._check("ibv_req_notify_cq", v.verbs_req_notify_cq(self.pointer, solicited_only))
        finally:
            self._unuse()

    def ack_events(self, int count=1):
        """Acknowledge events that `CompletionChannel.get_event` returned: ``ibv_ack_cq_events``.

        :param count: how many of them.
        :raises ValueError: so many were not taken, or were acknowledged before.
        """
        self._use_memory("ibv_ack_cq_events")
        try:
            if count < 0 or not gate_leave_many(&self._unacknowledged, count):
                raise ValueError(f"{self._unacknowledged} events of {self!r} can be acknowledged, not {count}")
            self.context.table.ack_cq_events(self.pointer, count)
            gate_leave_many(&self._gate, count)
        finally:
            self._unuse()

    def poll(self, int count=16):
        """Take up to `count` completions, a list of `WorkCompletion`: ``ibv_poll_cq``, or ``ibv_start_poll`` and on.

        :raises ValueError: `count` is less than 1.
        :raises VerbsError: with EIO where the queue is broken and all that it still had was taken.
        """
        self._use("ibv_poll_cq")
        try:
            if count < 1:
                raise ValueError(f"poll takes 1 completion at least, not {count}")
            return self._poll(count)
        finally:
            self._unuse()

    cdef list _poll(self, int count):
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef uint64_t timestamps[POLL_BATCH]
        cdef uint64_t *stamps = timestamps if self._timestamps else NULL
        cdef v.ibv_wc *wc
        cdef WorkCompletion completion
        cdef int wanted, found, error, i
        result = []
        while True:
            wanted = min(count, POLL_BATCH)
            error = 0
            if self._resizing:
                # Whoever resizes may hold the queue's lock while an allocator waits for the GIL.
                with nogil:
                    found = _take(self.pointer, self.extended_pointer, wanted, wcs, stamps, &error)
            else:
                found = _take(self.pointer, self.extended_pointer, wanted, wcs, stamps, &error)
            if found < 0:
                # The software device tells the error, others just fail.
                error = -found if self.context.software else EIO
            if error and found <= 0 and not result:
                self._check("ibv_start_poll" if self.extended_pointer else "ibv_poll_cq", error)
            for i in range(found):
                wc = &wcs[i]
                completion = WorkCompletion.__new__(WorkCompletion)
                completion.wr_id = wc.wr_id
                completion.status = _statuses.get(wc.status, wc.status)
                completion.opcode = wc.opcode
                completion.vendor_err = wc.vendor_err
                completion.byte_len = wc.byte_len
                if wc.wc_flags & v.IBV_WC_WITH_INV:
                    completion.invalidated_rkey = wc.imm_data       # a union, in host order
                elif wc.wc_flags & v.IBV_WC_WITH_IMM:
                    completion.imm_data = v.ntohl(wc.imm_data)
                completion.qp_num = wc.qp_num
                completion.src_qp = wc.src_qp
                completion.wc_flags = wc.wc_flags
                completion.slid = wc.slid
                completion.sl = wc.sl
                if stamps:
                    completion.completion_timestamp = stamps[i]
                result.append(completion)
            count -= wanted
            if found < wanted or not count:
                return result


cdef inline int _take(
    ibv_cq *cq, ibv_cq_ex *extended, int wanted, v.ibv_wc *wcs, uint64_t *stamps, int *error
) noexcept nogil:
    if extended:
        return _take_extended(extended, wanted, wcs, stamps, error)
    return v.verbs_poll_cq(cq, wanted, wcs)


# No Python object is made or dropped between start_poll and end_poll: that could run a finalizer, which may use this
# queue, or let another thread run, which would wait for the queue's lock while it keeps the GIL from this one.
cdef int _take_extended(ibv_cq_ex *cq, int wanted, v.ibv_wc *wcs, uint64_t *stamps, int *error) noexcept nogil:
    cdef v.ibv_poll_cq_attr attr
    cdef v.ibv_wc *wc
    cdef int found = 0, last
    attr.comp_mask = 0
    last = cq.start_poll(cq, &attr)
    if last:
        error[0] = 0 if last == ENOENT else last
        return 0
    while True:
        wc = &wcs[found]
        memset(wc, 0, sizeof(wc[0]))
        wc.wr_id = cq.wr_id
        wc.status = <v.ibv_wc_status>cq.status
        wc.vendor_err = cq.read_vendor_err(cq)
        wc.qp_num = cq.read_qp_num(cq)
        if stamps:
            stamps[found] = cq.read_completion_ts(cq)
        if cq.status == 0:
            wc.opcode = <v.ibv_wc_opcode>cq.read_opcode(cq)
            wc.byte_len = cq.read_byte_len(cq)
            wc.imm_data = cq.read_imm_data(cq)
            wc.src_qp = cq.read_src_qp(cq)
            wc.wc_flags = cq.read_wc_flags(cq)
            wc.slid = cq.read_slid(cq)
            wc.sl = cq.read_sl(cq)
        found += 1
        if found == wanted or cq.next_poll(cq):
            break
    cq.end_poll(cq)
    return found
