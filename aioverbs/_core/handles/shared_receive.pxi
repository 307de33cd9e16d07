# Part of handles.pyx: shared receive queues.

cdef class SharedReceiveQueue(Handle):
    """Shared receive queue, created with ``ibv_create_srq``, or with ``ibv_create_srq_ex`` for XRC queue pairs.

    :param pd: protection domain, or a parent domain that provides locks and memory.
    :param max_wr: minimum number of receives that the queue holds; `query` returns the actual one.
    :param max_sge: number of scatter/gather entries of a receive.
    :param limit: the event ``EventType.SRQ_LIMIT_REACHED`` is raised, once, when fewer receives than this are left; 0
        for never.
    :param xrc_domain: XRC domain whose queue pairs use the queue; requires `cq`.
    :param cq: completion queue of the receives of an XRC queue. Receives of other queues complete in the queue pair's
        CQ.
    :param affinity: owner of the queue; None for the owner of the other arguments. If these have none either, any
        thread may use the queue.
    :raises ValueError: only one of `xrc_domain` and `cq` is given, or an argument belongs to another context or another
        owner.
    :raises ClosedResourceError: an argument is closed.
    :raises AffinityError: the caller is not the owner of the new queue.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner, or of the same thread domain.
    :raises VerbsError: the verb failed; with EINVAL if the device has no queue of that size, or `limit` exceeds it;
        also if a parent domain's allocator failed: its exception is then the cause, or propagates unchanged if it is
        not an `Exception`.
    """

    def __init__(
        self,
        ProtectionDomain pd not None,
        uint32_t max_wr,
        uint32_t max_sge=1,
        uint32_t limit=0,
        *,
        XrcDomain xrc_domain=None,
        CompletionQueue cq=None,
        Affinity affinity=None,
    ):
        self._begin()
        if (xrc_domain is None) != (cq is None):
            raise ValueError("a shared receive queue for XRC takes both `xrc_domain` and `cq`, any other neither")
        for part in (xrc_domain, cq):
            if part is not None and (<Handle>part).context is not pd.context:
                raise ValueError(f"{part!r} belongs to a different context than {pd!r}")
        verb = "ibv_create_srq" if xrc_domain is None else "ibv_create_srq_ex"
        self._enter_owner(_common_owner((pd, cq), affinity), verb)
        try:
            self._create(pd, max_wr, max_sge, limit, xrc_domain, cq, verb)
        finally:
            self._leave_owner()

    def _create(
        self, ProtectionDomain pd, uint32_t max_wr, uint32_t max_sge, uint32_t limit, xrc_domain, cq, str verb
    ):
        """Create the queue with `verb`, which names the function, arm its limit, and count it as a user of its parents.
        If that fails, the queue is destroyed and the parents are left unchanged; but if the queue cannot be destroyed,
        its handle stays open.

        :raises VerbsError: a verb failed.
        :raises ClosedResourceError: the protection domain, the XRC domain or the completion queue is closed.
        """
        cdef int error = 0
        held = _enter_all((pd, xrc_domain, cq))
        self.context = pd.context
        self.pd = pd
        self.xrc_domain = xrc_domain
        self.cq = cq
        try:
            if xrc_domain is not None:
                error = self._create_xrc(pd, max_wr, max_sge, xrc_domain, cq)
            else:
                error = self._create_basic(pd, max_wr, max_sge)
            if not self.pointer:
                raise self._verb_error(verb, error, pd._take_cause())
            if limit:                   # not every provider takes a limit at creation
                self._modify(v.IBV_SRQ_LIMIT, 0, limit)
            self._opened("")
        except BaseException:
            if self.pointer and self._destroy_verb():
                self._opened("")        # the queue cannot be destroyed yet: an open handle, visible in the ledger
            else:
                _leave_all(held)
            raise

    def _create_basic(self, ProtectionDomain pd, uint32_t max_wr, uint32_t max_sge):
        """Call ``ibv_create_srq`` and set `pointer`, to NULL on failure. Return errno, which is valid only on
        failure."""
        cdef v.ibv_srq_init_attr attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        attr.srq_context = <void *>self
        attr.attr.max_wr = max_wr
        attr.attr.max_sge = max_sge
        with nogil:
            self.pointer = pd.context.table.create_srq(pd.pointer, &attr)
            error = errno
        return error

    def _create_xrc(
        self, ProtectionDomain pd, uint32_t max_wr, uint32_t max_sge, XrcDomain xrc_domain, CompletionQueue cq
    ):
        """Call ``ibv_create_srq_ex`` and set `pointer`, to NULL on failure. Return errno, which is valid only on
        failure."""
        cdef v.ibv_srq_init_attr_ex attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        attr.srq_context = <void *>self
        attr.attr.max_wr = max_wr
        attr.attr.max_sge = max_sge
        attr.comp_mask = (
            v.IBV_SRQ_INIT_ATTR_TYPE | v.IBV_SRQ_INIT_ATTR_PD | v.IBV_SRQ_INIT_ATTR_XRCD | v.IBV_SRQ_INIT_ATTR_CQ
        )
        attr.srq_type = v.IBV_SRQT_XRC
        attr.pd = pd.pointer
        attr.xrcd = xrc_domain.pointer
        attr.cq = cq.pointer
        with nogil:
            self.pointer = v.verbs_create_srq_ex(pd.context.pointer, &attr)
            error = errno
        return error

    cdef str _destroy_name(self):
        return "ibv_destroy_srq"

    cdef bint _refuses_overlap(self) noexcept:
        return True

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.destroy_srq(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.pd._leave()
        if self.xrc_domain is not None:
            self.xrc_domain._leave()
            self.cq._leave()

    @property
    def number(self):
        """Number of the queue, an int, which XRC peers need to send to it. Each use calls ``ibv_get_srq_num``.

        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises VerbsError: with EINVAL if the queue is not for XRC.
        """
        cdef uint32_t number = 0
        cdef int error
        self._use("ibv_get_srq_num")
        try:
            error = v.verbs_get_srq_num(self.pointer, &number)
        finally:
            self._unuse()
        self._check("ibv_get_srq_num", error)
        return number

    def modify(self, max_wr=None, limit=None):
        """Resize the queue or arm its limit, or both (``ibv_modify_srq``). Return None.

        :param max_wr: new minimum number of receives that the queue holds; receives in the queue stay there. None to
            leave the size unchanged.
        :param limit: the event ``EventType.SRQ_LIMIT_REACHED`` is raised, once, when fewer receives than this are left;
            0 for never. None to leave the limit unchanged.
        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises OverflowError: an argument is not in 0..2**32-1.
        :raises VerbsError: with EINVAL if more receives than `max_wr` are in the queue, or have completed without being
            polled, or if `limit` exceeds the size of the queue; also if a parent domain's allocator failed: its
            exception is then the cause, or propagates unchanged if it is not an `Exception`. The queue is unchanged.
        """
        cdef int mask = 0
        if max_wr is not None:
            mask |= v.IBV_SRQ_MAX_WR
        if limit is not None:
            mask |= v.IBV_SRQ_LIMIT
        self._use("ibv_modify_srq")
        try:
            self._modify(mask, max_wr or 0, limit or 0)
        finally:
            self._unuse()

    def _modify(self, int mask, uint32_t max_wr, uint32_t limit):
        """Call ``ibv_modify_srq``; the caller has begun the verb. Return None.

        :param mask: which of the other arguments to set, bits of ``enum ibv_srq_attr_mask``.
        :raises VerbsError: the verb failed, as for `modify`.
        """
        cdef v.ibv_srq_attr attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        attr.max_wr = max_wr
        attr.srq_limit = limit
        with nogil:
            error = self.context.table.modify_srq(self.pointer, &attr, mask)
        if error:
            cause = self.pd._take_cause()
            if cause is not None:
                raise self._verb_error("ibv_modify_srq", abs(error), cause)
        self._check("ibv_modify_srq", error)

    def query(self):
        """Query the size and the limit of the queue (``ibv_query_srq``).

        :returns: a new `SrqAttributes`.
        :raises AffinityError: the caller is not the queue's owner.
        :raises ClosedResourceError: the queue is closed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner or thread domain.
        :raises VerbsError: the verb failed.
        """
        cdef v.ibv_srq_attr attr
        cdef int error
        memset(&attr, 0, sizeof(attr))
        self._use("ibv_query_srq")
        try:
            with nogil:
                error = self.context.table.query_srq(self.pointer, &attr)
        finally:
            self._unuse()
        self._check("ibv_query_srq", error)
        return SrqAttributes(max_wr=attr.max_wr, max_sge=attr.max_sge, limit=attr.srq_limit)
