# Part of software.pyx: the fault plan of the software device.

cdef object _record_kinds = {
    int(s.SOFT_RECORD_VERB): "verb",
    int(s.SOFT_RECORD_REQUEST): "request",
    int(s.SOFT_RECORD_RECEIVE): "receive",
    int(s.SOFT_RECORD_LOSS): "loss",
    int(s.SOFT_RECORD_DROP): "drop",
    int(s.SOFT_RECORD_DUPLICATE): "duplicate",
    int(s.SOFT_RECORD_DELAY): "delay",
    int(s.SOFT_RECORD_CUT): "cut",
}
cdef object _verb_numbers = {
    s.soft_verb_name(<s.soft_verb>number).decode(): number for number in range(s.SOFT_ANY_VERB)
}

cdef enum:
    RECORD_BATCH = 64
    MAX_RECORDS = 4096
    MILLION = 1000000
    MAX_ERRNO = 4095


cdef class FaultPlan:
    """What is to go wrong in a context of the software device, and when: `Context.faults`.

    A plan can be repeated: faults strike by the number of a call or request, chances are drawn from a seed and from
    such numbers, not from time. Where a rule strikes is told by three numbers, which count from 1 and from the making
    of the rule: the ``first`` one, from there on each ``every``-th, ``times`` in all (0: without end). Where several
    rules strike at once the oldest one counts.

    Each method raises ValueError for a number out of its range, a verb that is none or an object of another context,
    and VerbsError with ENOMEM where there is no memory for a rule; then the plan is as it was. Error numbers are those
    of `errno`, chances are of 1,000,000, times are in nanoseconds.

    ``verbs`` has the names of the verbs, as ``"create_qp"``; ``frames`` has the kinds of what goes to and fro between a
    queue pair and its peer in another process: its own requests, ``"request_out"``, and what is answered to these,
    ``"answer_in"``; the peer's requests and the answers to these, ``"request_in"`` and ``"answer_out"``.
    """

    cdef readonly Context context

    verbs = tuple(_verb_numbers)
    frames = ("request_out", "answer_in", "request_in", "answer_out")

    def __cinit__(self, Context context not None):
        self.context = context

    def __init__(self, *_):
        raise TypeError("the fault plan of a context is its `faults`")

    def __repr__(self):
        return f"<FaultPlan of {self.context!r}>"

    # ---- verbs

    def fail(self, verb, int error, *, first=1, every=1, times=1):
        """Calls of a verb, or of any where it is None, fail with that error number and do nothing."""
        cdef s.soft_strike strike = _strike(first, every, times)
        cdef int number = _verb_number(verb)
        _check_range("error", error, 1, MAX_ERRNO)
        self.context._enter()
        try:
            error = s.soft_fault_verb(self.context.pointer, <s.soft_verb>number, strike, error)
        finally:
            self.context._leave()
        self.context._check("soft_fault_verb", error)

    def fail_at_random(self, per_million, int error):
        """Each call of any verb fails with that chance; 0 ends it."""
        cdef uint32_t chance = _check_range("per_million", per_million, 0, MILLION)
        _check_range("error", error, 1, MAX_ERRNO)
        self.context._enter()
        try:
            error = s.soft_fault_verbs_at_random(self.context.pointer, chance, error)
        finally:
            self.context._leave()
        self.context._check("soft_fault_verbs_at_random", error)

    def count_calls(self, bint on=True):
        """Count the calls of verbs from here on, beginning with none; or end it, and keep what was counted."""
        self.context._enter()
        s.soft_fault_count(self.context.pointer, on)
        self.context._leave()

    def calls(self, verb=None):
        """How many calls of a verb were counted, or of all."""
        cdef int number = _verb_number(verb)
        self.context._enter()
        try:
            return s.soft_fault_calls(self.context.pointer, <s.soft_verb>number)
        finally:
            self.context._leave()

    # ---- requests and messages

    def fail_request(
        self, status, QueuePair qp=None, *, bint receives=False, first=1, every=1, times=1, uint32_t vendor_err=0
    ):
        """Requests of a queue pair, or of any, complete with that `WcStatus`, which breaks the queue pair as it does.

        :param receives: receives instead, as messages come for them. The sender, where it is told, sees REM_OP_ERR;
            REM_INV_REQ_ERR where the status is LOC_LEN_ERR.
        """
        cdef s.soft_strike strike = _strike(first, every, times)
        cdef int code = WcStatus(status), error
        cdef uint32_t number
        if not code:
            raise ValueError("a request is to fail with another status than SUCCESS")
        self.context._enter()
        try:
            number = self._number(qp)
            error = s.soft_fault_request(
                self.context.pointer, number, receives, strike, <v.ibv_wc_status>code, vendor_err
            )
        finally:
            self.context._leave()
        self.context._check("soft_fault_request", error)

    def lose_messages(self, QueuePair qp=None, *, first=1, every=1, times=1):
        """Messages of a queue pair, or of any, are lost on their way; each attempt to send one counts."""
        cdef s.soft_strike strike = _strike(first, every, times)
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_loss(self.context.pointer, self._number(qp), strike)
        finally:
            self.context._leave()
        self.context._check("soft_fault_loss", error)

    def lose_messages_at_random(self, per_million):
        """Each message is lost with that chance: with 1,000,000 the link is cut, with 0 it is whole again."""
        cdef uint32_t chance = _check_range("per_million", per_million, 0, MILLION)
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_loss_at_random(self.context.pointer, chance)
        finally:
            self.context._leave()
        self.context._check("soft_fault_loss_at_random", error)

    def jitter(self, max_ns):
        """Each request waits up to that much longer before it is executed; 0 ends it. For contexts with an engine.

        :raises VerbsError: with EINVAL where the context has none.
        """
        cdef uint64_t most = _check_range("max_ns", max_ns, 0, (1 << 63) - 1)
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_jitter(self.context.pointer, most)
        finally:
            self.context._leave()
        self.context._check("soft_fault_jitter", error)

    # ---- frames: what goes between devices of different processes
    #
    # A long message goes in several frames; one answer may acknowledge many requests. Rules are about the frames of a
    # kind, or of all kinds, counted together; of a queue pair, or of all of this context; to and from the device with
    # the GID `peer`, 16 bytes as in `Endpoint.gid`, or any.

    def drop_frames(self, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Frames are lost."""
        _add_frame_rule(self, s.SOFT_DROP, kind, qp, peer, 0, _strike(first, every, times))

    def duplicate_frames(self, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Frames come a second time, soon after the first."""
        _add_frame_rule(self, s.SOFT_DUPLICATE, kind, qp, peer, 0, _strike(first, every, times))

    def delay_frames(self, delay_ns, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Frames come so much later; those that follow overtake them.

        A stream keeps 4 MiB of them; what is more is lost.
        """
        cdef uint64_t delay = _check_range("delay_ns", delay_ns, 0, (1 << 63) - 1)
        _add_frame_rule(self, s.SOFT_DELAY, kind, qp, peer, delay, _strike(first, every, times))

    def cut_at_frames(self, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """The stream is cut as such a frame comes, which is lost with all that is on its way there."""
        _add_frame_rule(self, s.SOFT_CUT, kind, qp, peer, 0, _strike(first, every, times))

    def disturb_frames_at_random(self, *, drop=0, duplicate=0, delay=0, cut=0, max_delay_ns=0):
        """Each frame meets with one of these with its chance, delays of up to `max_delay_ns`; without any it ends.

        :raises ValueError: also where the chances are more than 1,000,000 together.
        """
        cdef uint32_t chances[s.SOFT_MISHAPS]
        cdef uint64_t most = _check_range("max_delay_ns", max_delay_ns, 0, (1 << 63) - 1)
        cdef int error
        chances[<int>s.SOFT_DROP] = _check_range("drop", drop, 0, MILLION)
        chances[<int>s.SOFT_DUPLICATE] = _check_range("duplicate", duplicate, 0, MILLION)
        chances[<int>s.SOFT_DELAY] = _check_range("delay", delay, 0, MILLION)
        chances[<int>s.SOFT_CUT] = _check_range("cut", cut, 0, MILLION)
        _check_range("the sum of all chances", drop + duplicate + delay + cut, 0, MILLION)
        self.context._enter()
        try:
            error = s.soft_fault_frames_at_random(self.context.pointer, chances, most)
        finally:
            self.context._leave()
        self.context._check("soft_fault_frames_at_random", error)

    def cut_streams(self, peer=None):
        """Cut all connections of the device with a peer, or with all, as they are now; how many there were.

        They are of all contexts of the device. Those that are needed again are connected again.
        """
        cdef bytes gid = _check_gid(peer)
        cdef uint8_t *where = NULL if gid is None else <uint8_t *><char *>gid
        cdef unsigned int count = 0
        cdef int error
        self.context._enter()
        try:
            with nogil:
                error = s.soft_fault_cut(self.context.pointer, where, &count)
        finally:
            self.context._leave()
        self.context._check("soft_fault_cut", error)
        return count

    def stall_streams(self, peer=None, bint on=True):
        """Read nothing more of the connections with a peer, or with all, that there are now; how many there were.

        That lasts as long as they do, or until it is called with `on` false. To either side the other seems silent.
        """
        cdef bytes gid = _check_gid(peer)
        cdef uint8_t *where = NULL if gid is None else <uint8_t *><char *>gid
        cdef unsigned int count = 0
        cdef int error
        self.context._enter()
        try:
            with nogil:
                error = s.soft_fault_stall(self.context.pointer, where, on, &count)
        finally:
            self.context._leave()
        self.context._check("soft_fault_stall", error)
        return count

    # ---- completions

    def hold(self, QueuePair qp=None):
        """Hold the completions of a queue pair, or of all, from here on until `unhold`."""
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_hold(self.context.pointer, self._number(qp))
        finally:
            self.context._leave()
        self.context._check("soft_fault_hold", error)

    def held(self):
        """How many completions are held."""
        self.context._enter()
        try:
            return s.soft_fault_held(self.context.pointer)
        finally:
            self.context._leave()

    def release(self, count=0, *, bint shuffled=False):
        """Let so many completions go, or all that are held now; how many went.

        :param shuffled: not in the order in which they came but drawn across queues; those of one keep their order.
        """
        cdef size_t most = _check_range("count", count, 0, (1 << 63) - 1)
        self.context._enter()
        try:
            return s.soft_fault_release(self.context.pointer, most, shuffled)
        finally:
            self.context._leave()

    def unhold(self):
        """Let all completions go, and hold none any more."""
        self.context._enter()
        s.soft_fault_unhold(self.context.pointer)
        self.context._leave()

    # ---- the plan as a whole

    def seed(self, uint64_t seed):
        """Draw chances from here, as if nothing had been drawn before."""
        self.context._enter()
        s.soft_fault_seed(self.context.pointer, seed)
        self.context._leave()

    def clear(self):
        """Forget all rules and let all completions go. Calls go on being counted, delayed frames come in their time."""
        self.context._enter()
        s.soft_fault_clear(self.context.pointer)
        self.context._leave()

    def records(self):
        """What the plan did so far, a list of `FaultRecord`, oldest first; the first 4096 are kept."""
        cdef s.soft_fault_record records[RECORD_BATCH]
        cdef Py_ssize_t total, taken = 0, i
        found = []
        self.context._enter()
        try:
            while True:
                memset(records, 0, sizeof(records))
                total = s.soft_fault_records(self.context.pointer, taken, records, RECORD_BATCH)
                for i in range(min(min(total, MAX_RECORDS) - taken, RECORD_BATCH)):
                    found.append(_record(&records[i]))
                taken += RECORD_BATCH
                if taken >= min(total, MAX_RECORDS):
                    return found
        finally:
            self.context._leave()

    # ---- what happens to the device

    def set_port(self, bint up):
        """Take the device's port down, or up again, for all contexts: ``PORT_ERR``, ``PORT_ACTIVE``."""
        cdef int error
        self.context._enter()
        try:
            with nogil:
                error = s.soft_set_port(self.context.pointer, up)
        finally:
            self.context._leave()
        self.context._check("soft_set_port", error)

    def lose_device(self):
        """Take the device away from this context, for good: ``DEVICE_FATAL``.

        Verbs answer EIO from here on, but for those that destroy, or take what is there; nothing completes. A peer that
        is just at memory of what was under way is waited for, 2 s at most.
        """
        cdef int error
        self.context._enter()
        try:
            with nogil:
                error = s.soft_lose(self.context.pointer)
        finally:
            self.context._leave()
        self.context._check("soft_lose", error)

    def break_queue_pair(self, QueuePair qp not None):
        """A queue pair breaks by itself: ``QP_FATAL``."""
        cdef int error
        self._enter_own(qp)
        try:
            with nogil:
                error = s.soft_break_qp(qp.pointer)
        finally:
            qp._leave()
        self.context._check("soft_break_qp", error)

    def break_completion_queue(self, CompletionQueue cq not None):
        """A completion queue breaks, as by an overrun: ``CQ_ERR``."""
        cdef int error
        self._enter_own(cq)
        try:
            with nogil:
                error = s.soft_break_cq(cq.pointer)
        finally:
            cq._leave()
        self.context._check("soft_break_cq", error)

    def break_shared_receive_queue(self, SharedReceiveQueue srq not None):
        """Nothing is taken from a shared receive queue any more: ``SRQ_ERR``."""
        cdef int error
        self._enter_own(srq)
        try:
            with nogil:
                error = s.soft_break_srq(srq.pointer)
        finally:
            srq._leave()
        self.context._check("soft_break_srq", error)

    cdef int _enter_own(self, Handle handle) except -1:
        # As long as it is in use its context cannot be closed.
        handle._enter()
        if handle.context is not self.context:
            handle._leave()
            raise ValueError(f"{handle!r} is not of {self.context!r}")
        return 0

    cdef uint32_t _number(self, QueuePair qp) except? 0:
        # The number that a rule has it by; 0 is that of all.
        cdef uint32_t number = 0
        if qp is not None:
            self._enter_own(qp)
            number = qp.pointer.qp_num
            qp._leave()
        return number


cdef int _add_frame_rule(
    FaultPlan plan, s.soft_mishap mishap, kind, QueuePair qp, peer, uint64_t delay_ns, s.soft_strike strike
) except -1:
    cdef s.soft_frame_fault fault
    cdef bytes gid = _check_gid(peer)
    cdef int error
    fault.mishap = mishap
    fault.kinds = _frame_kinds(kind)
    fault.gid = NULL if gid is None else <uint8_t *><char *>gid
    fault.delay_ns = delay_ns
    fault.strike = strike
    plan.context._enter()
    try:
        fault.qp_num = plan._number(qp)
        error = s.soft_fault_frames(plan.context.pointer, &fault)
    finally:
        plan.context._leave()
    plan.context._check("soft_fault_frames", error)
    return 0


cdef object _check_range(str name, value, least, most):
    value = PyNumber_Index(value)
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")
    return value


cdef s.soft_strike _strike(first, every, times) except *:
    cdef s.soft_strike strike
    strike.first = _check_range("first", first, 1, (1 << 63) - 1)
    strike.every = _check_range("every", every, 1, (1 << 63) - 1)
    strike.times = _check_range("times", times, 0, (1 << 63) - 1)
    return strike


cdef int _verb_number(verb) except -1:
    if verb is None:
        return s.SOFT_ANY_VERB
    number = _verb_numbers.get(verb)
    if number is None:
        raise ValueError(f"the software device has no verb {verb!r}; it has {', '.join(_verb_numbers)}")
    return number


cdef unsigned int _frame_kinds(kind) except 0:
    if kind is None:
        return (1 << <int>s.SOFT_FRAME_KINDS) - 1
    if kind not in FaultPlan.frames:
        raise ValueError(f"{kind!r} is no kind of frame; these are: {', '.join(FaultPlan.frames)}")
    return 1 << <int>FaultPlan.frames.index(kind)


cdef bytes _check_gid(peer):
    if peer is None:
        return None
    if not isinstance(peer, bytes) or len(peer) != 16:
        raise ValueError(f"a peer is known by its GID, 16 bytes as Endpoint.gid has them, not by {peer!r}")
    return peer


cdef object _record(s.soft_fault_record *record):
    kind = _record_kinds[<int>record.what]
    if kind == "verb":
        name = FaultPlan.verbs[record.which]
        return FaultRecord(kind, name, record.ordinal, record.value)
    if kind == "loss":
        value = None
    elif kind in ("request", "receive"):
        value = WcStatus(record.value)
    else:
        value = FaultPlan.frames[record.value]
    return FaultRecord(kind, record.which, record.ordinal, value)
