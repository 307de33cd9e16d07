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
    """Plan of the faults that a context of the software device injects; obtained from `Context.faults`.

    A plan is reproducible: when a fault strikes depends on the number of a call or request, for random faults also on a
    seed, but not on time.

    Three arguments select the calls, requests, messages or frames at which a rule strikes. These are numbered from 1
    onwards, starting at the creation of the rule. The rule strikes at number ``first``, then at every ``every``-th one
    after that, ``times`` times in all (0 for no limit). If several rules would strike at the same time, only the oldest
    of them does.

    Error numbers are those of `errno`, chances are per 1,000,000, and times are in nanoseconds. ``verbs`` lists the
    names of the verbs, such as ``"create_qp"``. ``frames`` lists the kinds of frames between a queue pair and its peer
    in another process: the queue pair's requests, ``"request_out"``, and their answers, ``"answer_in"``; the peer's
    requests, ``"request_in"``, and their answers, ``"answer_out"``.

    Methods return None unless their description says otherwise. Every method raises these errors, and then leaves the
    plan unchanged:

    :raises ClosedResourceError: the context, or an object that is passed, is closed.
    :raises ValueError: a number is out of range, the verb or frame kind is unknown, or an object belongs to another
        context.
    :raises TypeError: an argument has the wrong type.
    :raises VerbsError: with ENOMEM if there is not enough memory for a rule.
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

    def fail(self, verb, error, *, first=1, every=1, times=1):
        """Make calls of a verb fail with an error number; a call that fails does nothing else.

        :param verb: name of the verb; None for all verbs.
        :param error: error number, 1..4095.
        :param first: 1-based number of the first call that fails.
        :param every: 1 to fail every call from the first onwards, 2 to fail every second one, and so on.
        :param times: number of failing calls; 0 for no limit.
        :raises ValueError: `verb` is unknown, or a number is out of range.
        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for the rule.
        """
        cdef s.soft_strike strike = _strike(first, every, times)
        cdef int number = _verb_number(verb), injected = _check_range("error", error, 1, MAX_ERRNO), failed
        self.context._enter()
        try:
            failed = s.soft_fault_verb(self.context.pointer, <s.soft_verb>number, strike, injected)
        finally:
            self.context._leave()
        self.context._check("soft_fault_verb", failed)

    def fail_at_random(self, per_million, error):
        """Make each call of any verb fail with a given probability.

        :param per_million: chance of a failure per 1,000,000 calls, 0..1,000,000; 0 ends the failures.
        :param error: error number, 1..4095.
        :raises ValueError: a number is out of range.
        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for records.
        """
        cdef uint32_t chance = _check_range("per_million", per_million, 0, MILLION)
        cdef int injected = _check_range("error", error, 1, MAX_ERRNO), failed
        self.context._enter()
        try:
            failed = s.soft_fault_verbs_at_random(self.context.pointer, chance, injected)
        finally:
            self.context._leave()
        self.context._check("soft_fault_verbs_at_random", failed)

    def count_calls(self, bint on=True):
        """Count the calls of each verb, starting from 0.

        :param on: True to count; False to stop counting and keep the counts.
        :raises ClosedResourceError: the context is closed.
        """
        self.context._enter()
        s.soft_fault_count(self.context.pointer, on)
        self.context._leave()

    def calls(self, verb=None):
        """Return the number of calls that were counted since `count_calls` was last called with True; 0 if that never
        happened.

        :param verb: name of the verb; None for the sum over all verbs.
        :raises ValueError: `verb` is unknown.
        :raises ClosedResourceError: the context is closed.
        """
        cdef int number = _verb_number(verb)
        self.context._enter()
        try:
            return s.soft_fault_calls(self.context.pointer, <s.soft_verb>number)
        finally:
            self.context._leave()

    # ---- requests and messages

    def fail_request(
        self, status, QueuePair qp=None, *, bint receives=False, first=1, every=1, times=1, vendor_err=0
    ):
        """Make requests complete with an error status, without being executed. This breaks the queue pair, as a real
        error with that status does.

        Requests are counted from this call onwards, over all queue pairs if `qp` is None.

        :param status: a `WcStatus` other than SUCCESS.
        :param qp: the queue pair; None for all.
        :param receives: whether to fail receives instead of sends, when messages arrive for them. On a reliable
            connection, the sender's request then completes with REM_OP_ERR, or with REM_INV_REQ_ERR if `status` is
            LOC_LEN_ERR.
        :param first: 1-based number of the first request that fails.
        :param every: 1 to fail every request from the first onwards, 2 to fail every second one, and so on.
        :param times: number of failing requests; 0 for no limit.
        :param vendor_err: vendor error code of the completions, 0..2**32-1.
        :raises ValueError: `status` is SUCCESS or not a `WcStatus`; `first`, `every`, `times` or `vendor_err` is out of
            range; or `qp` belongs to another context.
        :raises ClosedResourceError: the context or `qp` is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for the rule.
        """
        cdef s.soft_strike strike = _strike(first, every, times)
        cdef int code = WcStatus(status), error
        cdef uint32_t number, vendor = _check_range("vendor_err", vendor_err, 0, (1 << 32) - 1)
        if not code:
            raise ValueError("`status` must be an error status, got SUCCESS")
        self.context._enter()
        try:
            number = self._number(qp)
            error = s.soft_fault_request(
                self.context.pointer, number, receives, strike, <v.ibv_wc_status>code, vendor
            )
        finally:
            self.context._leave()
        self.context._check("soft_fault_request", error)

    def lose_messages(self, QueuePair qp=None, *, first=1, every=1, times=1):
        """Lose messages on the way to the receiver. Each transmission of a message counts, including retries.

        :param qp: the sending queue pair; None for all.
        :param first: 1-based number of the first transmission that is lost.
        :param every: 1 to lose every transmission from the first onwards, 2 to lose every second one, and so on.
        :param times: number of lost transmissions; 0 for no limit.
        :raises ValueError: a number is out of range, or `qp` belongs to another context.
        :raises ClosedResourceError: the context or `qp` is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for the rule.
        """
        cdef s.soft_strike strike = _strike(first, every, times)
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_loss(self.context.pointer, self._number(qp), strike)
        finally:
            self.context._leave()
        self.context._check("soft_fault_loss", error)

    def lose_messages_at_random(self, per_million):
        """Lose each message with a given probability on the way to the receiver.

        :param per_million: chance of a loss per 1,000,000 messages, 0..1,000,000; 1,000,000 cuts the link, 0 restores
            it.
        :raises ValueError: `per_million` is out of range.
        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for records.
        """
        cdef uint32_t chance = _check_range("per_million", per_million, 0, MILLION)
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_loss_at_random(self.context.pointer, chance)
        finally:
            self.context._leave()
        self.context._check("soft_fault_loss_at_random", error)

    def jitter(self, max_ns):
        """Delay the execution of each request by a random time. Only for contexts with a worker thread.

        :param max_ns: upper limit of the delay in nanoseconds, 0..2**63-1; 0 for no delay.
        :raises ValueError: `max_ns` is out of range.
        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: with EINVAL if the context executes requests inline, without a worker thread.
        """
        cdef uint64_t most = _check_range("max_ns", max_ns, 0, (1 << 63) - 1)
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_jitter(self.context.pointer, most)
        finally:
            self.context._leave()
        self.context._check("soft_fault_jitter", error)

    # ---- frames: messages between devices of different processes
    #
    # A long message takes several frames; one answer may acknowledge many requests. A rule applies to frames of one
    # kind, or of all kinds counted together; to frames of one queue pair, or of all queue pairs of this context; and to
    # frames exchanged with the device that has the GID `peer` (16 bytes, as in `Endpoint.gid`), or with any device.

    def drop_frames(self, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Lose frames that are exchanged with devices of other processes.

        :param kind: kind of the frames, one of ``frames``; None for all.
        :param qp: the queue pair; None for all.
        :param peer: GID of the peer's device, 16 bytes; None for all.
        :param first: 1-based number of the first frame that is affected.
        :param every: 1 to affect every frame from the first onwards, 2 to affect every second one, and so on.
        :param times: number of affected frames; 0 for no limit.
        :raises ValueError: `kind` is unknown, a number is out of range, `peer` is not 16 bytes, or `qp` belongs to
            another context.
        :raises ClosedResourceError: the context or `qp` is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for the rule.
        """
        _add_frame_rule(self, s.SOFT_DROP, kind, qp, peer, 0, _strike(first, every, times))

    def duplicate_frames(self, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Deliver frames twice, the second time soon after the first. The arguments and errors are those of
        `drop_frames`."""
        _add_frame_rule(self, s.SOFT_DUPLICATE, kind, qp, peer, 0, _strike(first, every, times))

    def delay_frames(self, delay_ns, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Deliver frames later, so that subsequent frames overtake them. The other arguments, and the errors, are those
        of `drop_frames`.

        A stream, that is, a connection with another process, keeps at most 4 MiB of delayed frames; further ones are
        lost.

        :param delay_ns: delay in nanoseconds, 0..2**63-1.
        """
        cdef uint64_t delay = _check_range("delay_ns", delay_ns, 0, (1 << 63) - 1)
        _add_frame_rule(self, s.SOFT_DELAY, kind, qp, peer, delay, _strike(first, every, times))

    def cut_at_frames(self, kind=None, QueuePair qp=None, *, peer=None, first=1, every=1, times=1):
        """Cut the connection with the other process when a frame arrives: that frame and all frames in flight are lost.

        The arguments and errors are those of `drop_frames`.
        """
        _add_frame_rule(self, s.SOFT_CUT, kind, qp, peer, 0, _strike(first, every, times))

    def disturb_frames_at_random(self, *, drop=0, duplicate=0, delay=0, cut=0, max_delay_ns=0):
        """Disturb each frame with the given probabilities. A call without arguments ends this.

        :param drop: chance of a loss, per 1,000,000.
        :param duplicate: chance of a second delivery, per 1,000,000.
        :param delay: chance of a delay, per 1,000,000.
        :param cut: chance that the connection is cut, per 1,000,000.
        :param max_delay_ns: upper limit of the random delays, in nanoseconds.
        :raises ValueError: a number is out of range, or the sum of the chances exceeds 1,000,000.
        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for records.
        """
        cdef uint32_t chances[s.SOFT_FRAME_FAULT_KINDS]
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
        """Cut the device's current connections with peers in other processes, for all contexts of the device.

        The device reconnects when it needs a connection.

        :param peer: GID of the peer's device, 16 bytes; None for all peers.
        :returns: the number of connections that were cut, 0 if there is no connection with `peer`.
        :raises ValueError: `peer` is not 16 bytes.
        :raises ClosedResourceError: the context is closed.
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
        """Stop reading from the device's current connections with peers in other processes, so that each side finds the
        other silent.

        :param peer: GID of the peer's device, 16 bytes; None for all peers.
        :param on: True to stop reading, False to resume.
        :returns: the number of connections that were stopped or resumed.
        :raises ValueError: `peer` is not 16 bytes.
        :raises ClosedResourceError: the context is closed.
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
        """Hold back all further completions until `unhold` is called; `release` releases those held so far.

        :param qp: queue pair whose completions are held back; None for all queue pairs.
        :raises ValueError: `qp` belongs to another context.
        :raises ClosedResourceError: the context or `qp` is closed.
        :raises VerbsError: with ENOMEM if there is not enough memory for the rule.
        """
        cdef int error
        self.context._enter()
        try:
            error = s.soft_fault_hold(self.context.pointer, self._number(qp))
        finally:
            self.context._leave()
        self.context._check("soft_fault_hold", error)

    def held(self):
        """Return the number of completions that are held back now.

        :raises ClosedResourceError: the context is closed.
        """
        self.context._enter()
        try:
            return s.soft_fault_held(self.context.pointer)
        finally:
            self.context._leave()

    def release(self, count=0, *, bint shuffled=False):
        """Release completions that `hold` has held back. Further completions are still held back.

        :param count: maximum number of completions to release; 0 for all that are held now.
        :param shuffled: whether to release them in random order; completions of the same queue pair still keep their
            order.
        :returns: the number of released completions.
        :raises ValueError: `count` is negative.
        :raises ClosedResourceError: the context is closed.
        """
        cdef size_t most = _check_range("count", count, 0, (1 << 63) - 1)
        self.context._enter()
        try:
            return s.soft_fault_release(self.context.pointer, most, shuffled)
        finally:
            self.context._leave()

    def unhold(self):
        """Release all completions that are held back, and stop holding back completions.

        :raises ClosedResourceError: the context is closed.
        """
        self.context._enter()
        s.soft_fault_unhold(self.context.pointer)
        self.context._leave()

    # ---- the plan as a whole

    def seed(self, seed):
        """Restart the random numbers on which the random faults depend.

        :param seed: the seed, 0..2**64-1.
        :raises ValueError: `seed` is out of range.
        :raises ClosedResourceError: the context is closed.
        """
        cdef uint64_t number = _check_range("seed", seed, 0, (1 << 64) - 1)
        self.context._enter()
        s.soft_fault_seed(self.context.pointer, number)
        self.context._leave()

    def clear(self):
        """Remove all rules and release all held completions. Calls are still counted, and delayed frames still arrive.

        :raises ClosedResourceError: the context is closed.
        """
        self.context._enter()
        s.soft_fault_clear(self.context.pointer)
        self.context._leave()

    def records(self):
        """Return a new list of `FaultRecord`, one for each fault that the plan has caused so far, oldest first. Only
        the first 4096 faults are recorded.

        :raises ClosedResourceError: the context is closed.
        """
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

    # ---- state of the device

    def set_port(self, bint up):
        """Take the device's port down or up, for all contexts. This raises the event ``PORT_ERR`` or ``PORT_ACTIVE``.

        :param up: True to take the port up, False to take it down.
        :raises ClosedResourceError: the context is closed.
        """
        cdef int error
        self.context._enter()
        try:
            with nogil:
                error = s.soft_set_port(self.context.pointer, up)
        finally:
            self.context._leave()
        self.context._check("soft_set_port", error)

    def lose_device(self):
        """Remove the device from this context permanently. This raises the event ``DEVICE_FATAL``.

        From then on, verbs return EIO, except for verbs that destroy an object or take an event or completion that has
        already arrived, and no request completes. If a peer is accessing memory of a request in flight, this call waits
        until the access ends, for at most 2 s. Further calls have no effect.

        :raises ClosedResourceError: the context is closed.
        :raises VerbsError: with ENOMEM if memory ran out.
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
        """Break a queue pair as a hardware fault would: it enters ERR. This raises the event ``QP_FATAL``.

        :param qp: the queue pair.
        :raises ValueError: `qp` belongs to another context.
        :raises ClosedResourceError: `qp` or its context is closed.
        :raises VerbsError: with ENOMEM if memory ran out.
        """
        cdef int error
        self._enter_own(qp)
        try:
            with nogil:
                error = s.soft_break_qp(qp.pointer)
        finally:
            qp._leave()
        self.context._check("soft_break_qp", error)

    def break_completion_queue(self, CompletionQueue cq not None):
        """Break a completion queue as an overrun would. This raises the event ``CQ_ERR``.

        :param cq: the completion queue.
        :raises ValueError: `cq` belongs to another context.
        :raises ClosedResourceError: `cq` or its context is closed.
        :raises VerbsError: with ENOMEM if memory ran out.
        """
        cdef int error
        self._enter_own(cq)
        try:
            with nogil:
                error = s.soft_break_cq(cq.pointer)
        finally:
            cq._leave()
        self.context._check("soft_break_cq", error)

    def break_shared_receive_queue(self, SharedReceiveQueue srq not None):
        """Break a shared receive queue: no more receives are taken from it. This raises the event ``SRQ_ERR``.

        :param srq: the shared receive queue.
        :raises ValueError: `srq` belongs to another context.
        :raises ClosedResourceError: `srq` or its context is closed.
        :raises VerbsError: with ENOMEM if memory ran out.
        """
        cdef int error
        self._enter_own(srq)
        try:
            with nogil:
                error = s.soft_break_srq(srq.pointer)
        finally:
            srq._leave()
        self.context._check("soft_break_srq", error)

    cdef int _enter_own(self, Handle handle) except -1:
        # Keep the object and its context open until `_leave`. Raise ValueError if the object does not belong to this
        # context, ClosedResourceError if it is closed.
        handle._enter()
        if handle.context is not self.context:
            handle._leave()
            raise ValueError(f"{handle!r} does not belong to {self.context!r}")
        return 0

    cdef uint32_t _number(self, QueuePair qp) except? 0:
        # Return the queue pair number that a rule uses; 0 for all queue pairs.
        cdef uint32_t number = 0
        if qp is not None:
            self._enter_own(qp)
            number = qp.pointer.qp_num
            qp._leave()
        return number


cdef int _add_frame_rule(
    FaultPlan plan, s.soft_frame_fault_kind mishap, kind, QueuePair qp, peer, uint64_t delay_ns, s.soft_strike strike
) except -1:
    # Add a rule for frames, with the errors of `FaultPlan`. `kind`, `qp` and `peer` are the arguments of `drop_frames`.
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
    # Return the value as an int; raise ValueError if it is out of range, TypeError if it is not an integer.
    value = PyNumber_Index(value)
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {value}")
    return value


cdef s.soft_strike _strike(first, every, times) except *:
    # Return the struct of the three numbers that select where a rule strikes; raise ValueError if one is out of range.
    cdef s.soft_strike strike
    strike.first = _check_range("first", first, 1, (1 << 63) - 1)
    strike.every = _check_range("every", every, 1, (1 << 63) - 1)
    strike.times = _check_range("times", times, 0, (1 << 63) - 1)
    return strike


cdef int _verb_number(verb) except -1:
    # Return the number of the verb with a name, SOFT_ANY_VERB for None; raise ValueError if there is no such verb.
    if verb is None:
        return s.SOFT_ANY_VERB
    number = _verb_numbers.get(verb)
    if number is None:
        raise ValueError(f"the software device has no verb {verb!r}; it has {', '.join(_verb_numbers)}")
    return number


cdef unsigned int _frame_kinds(kind) except 0:
    # Return the bit mask for the kind of frames with a name, for all kinds if it is None; raise ValueError if there is
    # no such kind.
    if kind is None:
        return (1 << <int>s.SOFT_FRAME_KINDS) - 1
    if kind not in FaultPlan.frames:
        raise ValueError(f"`kind` must be one of {', '.join(FaultPlan.frames)}, got {kind!r}")
    return 1 << <int>FaultPlan.frames.index(kind)


cdef bytes _check_gid(peer):
    # Return the GID `peer`, or None if it is None; raise ValueError if it is not 16 bytes.
    if peer is None:
        return None
    if not isinstance(peer, bytes) or len(peer) != 16:
        raise ValueError(f"`peer` must be a GID of 16 bytes, such as Endpoint.gid, got {peer!r}")
    return peer


cdef object _record(s.soft_fault_record *record):
    # Return a new `FaultRecord` with the contents of a struct.
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
