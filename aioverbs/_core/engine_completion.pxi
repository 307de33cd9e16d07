# Part of engine.pyx: completion channels and completion queues.

cdef class CompletionChannel(Handle):
    """A completion channel: ``ibv_create_comp_channel``. Its descriptor is non-blocking."""

    def __init__(self, Context context not None):
        cdef int error = 0
        self._begin()
        context._enter()
        try:
            with nogil:
                self.pointer = context.table.create_comp_channel(context.pointer)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_create_comp_channel", error)
            self.context = context
            flags = fcntl.fcntl(self.pointer.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.pointer.fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            self._opened(f"fd {self.pointer.fd}")
        except BaseException:
            if self.pointer:
                context.table.destroy_comp_channel(self.pointer)
            context._leave()
            raise

    cdef str _destroy_name(self):
        return "ibv_destroy_comp_channel"

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_comp_channel(self.pointer)
        if not error:
            self.context._leave()
        return error

    def fileno(self):
        """The file descriptor, readable while an event waits."""
        self._enter()
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
        cdef int failed
        self._enter()
        try:
            failed = self.context.table.get_cq_event(self.pointer, &cq, &handle)
            if failed:
                if errno == EAGAIN:
                    return None
                raise VerbsError("ibv_get_cq_event", errno)
            # The context of a queue is its handle, which the ledger keeps until the queue is destroyed; and that is
            # refused while an event of it is not acknowledged.
            queue = <CompletionQueue>handle
            queue._unacknowledged += 1
            return queue
        finally:
            self._leave()


cdef class WorkCompletion:
    """A completion: ``struct ibv_wc``. On an error only `wr_id`, `status`, `vendor_err` and `qp_num` mean anything."""

    def __init__(self):
        raise TypeError("completions come from CompletionQueue.poll")

    def __repr__(self):
        return f"<WorkCompletion {self.wr_id:#x}: {self.status.name}, queue pair {self.qp_num}>"


cdef object _statuses = {int(status): status for status in WcStatus}


cdef class CompletionQueue(Handle):
    """A completion queue: ``ibv_create_cq``, or ``ibv_create_cq_ex`` where `extended` or a keyword after it is given.

    :param cqe: how many completions it holds at least; `cqe` tells how many it does.
    :param channel: where its events arrive.
    :param extended: poll by ``ibv_start_poll`` and its relatives instead of by ``ibv_poll_cq``.
    :param parent_domain: takes locks and memory from there.
    :param single_threaded: takes no lock (``IBV_CREATE_CQ_ATTR_SINGLE_THREADED``).
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
    ):
        cdef int error = 0
        self._begin()
        if cqe < 1:
            raise ValueError(f"a completion queue holds 1 completion at least, not {cqe}")
        for part in (channel, parent_domain):
            if part is not None and (<Handle>part).context is not context:
                raise ValueError(f"{part!r} is of another context")
        use_ex = extended or single_threaded or parent_domain is not None
        held = _enter_all((context, channel, parent_domain))
        try:
            if use_ex:
                error = self._create_extended(context, cqe, channel, comp_vector, parent_domain, single_threaded)
            else:
                error = self._create_basic(context, cqe, channel, comp_vector)
            if not self.pointer:
                cause = parent_domain._take_cause() if parent_domain is not None else None
                raise VerbsError("ibv_create_cq_ex" if use_ex else "ibv_create_cq", error) from cause
            if not extended:
                self.extended_pointer = NULL
            self.context = context
            self.channel = channel
            self.parent_domain = parent_domain
            self._opened("")
        except BaseException:
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

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        if self._unacknowledged:
            # The verb would wait for them, for ever where nobody acknowledges.
            raise BusyResourceError(f"{self!r} has {self._unacknowledged} events that were not acknowledged")
        with nogil:
            error = self.context.table.destroy_cq(self.pointer)
        if not error:
            _leave_all([part for part in (self.context, self.channel, self.parent_domain) if part is not None])
        return error

    @property
    def cqe(self):
        """How many completions it holds."""
        self._enter()
        try:
            return self.pointer.cqe
        finally:
            self._leave()

    def request_notify(self, bint solicited_only=False):
        """Ask for one event, at the next completion that is added: ``ibv_req_notify_cq``."""
        self._enter()
        try:
            self._check("ibv_req_notify_cq", v.verbs_req_notify_cq(self.pointer, solicited_only))
        finally:
            self._leave()

    def ack_events(self, int count=1):
        """Acknowledge events that `CompletionChannel.get_event` returned: ``ibv_ack_cq_events``."""
        self._enter()
        try:
            if not 0 <= count <= self._unacknowledged:
                raise ValueError(f"{self._unacknowledged} events of {self!r} can be acknowledged, not {count}")
            self._unacknowledged -= count
            self.context.table.ack_cq_events(self.pointer, count)
        finally:
            self._leave()

    def poll(self, int count=16):
        """Take up to `count` completions: ``ibv_poll_cq``, or ``ibv_start_poll`` and on."""
        self._enter()
        try:
            if count < 1:
                raise ValueError(f"poll takes 1 completion at least, not {count}")
            if self.extended_pointer:
                return self._poll_extended(count)
            return self._poll_basic(count)
        finally:
            self._leave()

    cdef list _poll_basic(self, int count):
        cdef v.ibv_wc wcs[POLL_BATCH]
        cdef v.ibv_wc *wc
        cdef WorkCompletion completion
        cdef int wanted, found, i
        result = []
        while True:
            wanted = min(count, POLL_BATCH)
            found = v.verbs_poll_cq(self.pointer, wanted, wcs)
            if found < 0 and not result:
                # The software device tells the error, others just fail.
                self._check("ibv_poll_cq", -found if self.context.software else EIO)
            for i in range(found):
                wc = &wcs[i]
                completion = WorkCompletion.__new__(WorkCompletion)
                completion.wr_id = wc.wr_id
                completion.status = _statuses[wc.status]
                completion.opcode = wc.opcode
                completion.vendor_err = wc.vendor_err
                completion.byte_len = wc.byte_len
                completion.imm_data = socket.ntohl(wc.imm_data)
                completion.qp_num = wc.qp_num
                completion.src_qp = wc.src_qp
                completion.wc_flags = wc.wc_flags
                result.append(completion)
            count -= wanted
            if found < wanted or not count:
                return result

    cdef list _poll_extended(self, int count):
        cdef v.ibv_poll_cq_attr attr
        cdef WorkCompletion completion
        cdef int error
        cdef ibv_cq_ex *cq = self.extended_pointer
        result = []
        attr.comp_mask = 0
        error = cq.start_poll(cq, &attr)
        if error == ENOENT:
            return result
        self._check("ibv_start_poll", error)
        try:
            while True:
                completion = WorkCompletion.__new__(WorkCompletion)
                completion.wr_id = cq.wr_id
                completion.status = _statuses[cq.status]
                completion.vendor_err = cq.read_vendor_err(cq)
                completion.qp_num = cq.read_qp_num(cq)
                if cq.status == 0:
                    completion.opcode = cq.read_opcode(cq)
                    completion.byte_len = cq.read_byte_len(cq)
                    completion.imm_data = socket.ntohl(cq.read_imm_data(cq))
                    completion.src_qp = cq.read_src_qp(cq)
                    completion.wc_flags = cq.read_wc_flags(cq)
                result.append(completion)
                if len(result) == count:
                    break
                error = cq.next_poll(cq)
                if error:
                    break
        finally:
            cq.end_poll(cq)
        if error and error != ENOENT and not result:
            self._check("ibv_next_poll", error)
        return result
