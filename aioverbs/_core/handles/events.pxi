# Part of handles.pyx: asynchronous events of a device.

cdef object _event_types = {int(event_type): event_type for event_type in EventType}

# Class of the handle that an event is about, by the event's type. Other events are about a port or the device.
cdef object _element_kinds = {
    int(EventType.CQ_ERR): CompletionQueue,
    int(EventType.QP_FATAL): QueuePair,
    int(EventType.QP_REQ_ERR): QueuePair,
    int(EventType.QP_ACCESS_ERR): QueuePair,
    int(EventType.COMM_EST): QueuePair,
    int(EventType.SQ_DRAINED): QueuePair,
    int(EventType.PATH_MIG): QueuePair,
    int(EventType.PATH_MIG_ERR): QueuePair,
    int(EventType.QP_LAST_WQE_REACHED): QueuePair,
    int(EventType.SRQ_ERR): SharedReceiveQueue,
    int(EventType.SRQ_LIMIT_REACHED): SharedReceiveQueue,
}
cdef object _port_events = frozenset(
    int(event_type)
    for event_type in (
        EventType.PORT_ACTIVE,
        EventType.PORT_ERR,
        EventType.LID_CHANGE,
        EventType.PKEY_CHANGE,
        EventType.SM_CHANGE,
        EventType.CLIENT_REREGISTER,
        EventType.GID_CHANGE,
    )
)


cdef class AsyncEvent:
    """Asynchronous event: ``struct ibv_async_event``, taken by ``ibv_get_async_event``.

    Until the event is acknowledged, its object cannot be destroyed. If the event is dropped before that, it is
    acknowledged automatically, with a ResourceWarning.

    `event_type` is an `EventType`. `element` is the queue pair, completion queue or shared receive queue of the event,
    and `port_num` the number of its port. Each is None if it does not apply; both are None if the event is about
    the device, or about an object without a handle here.
    """

    def __init__(self):
        raise TypeError("events come from Context.get_async_event")

    def __repr__(self):
        about = f" of {self.element!r}" if self.element is not None else ""
        return f"<AsyncEvent {getattr(self.event_type, 'name', self.event_type)}{about}>"

    @property
    def acknowledged(self):
        """Whether the event was acknowledged. Never fails."""
        return not self._unacknowledged

    def ack(self):
        """Acknowledge the event, once and from any thread (``ibv_ack_async_event``).

        :raises ValueError: the event was acknowledged before; nothing is done.
        :raises ForkedProcessError: the event was taken in the parent process, before this process was forked.
        """
        if self._pinned_handle is not None and self._pinned_handle._forks != fork_count:
            raise ForkedProcessError(repr(self._pinned_handle))
        if not gate_leave_many(&self._unacknowledged, 1):
            raise ValueError(f"{self!r} was acknowledged before")
        _acknowledge(self)

    def __del__(self):
        if self._pinned_handle is None or self._pinned_handle._forks != fork_count:
            return
        if gate_leave_many(&self._unacknowledged, 1):
            _acknowledge(self)
            warnings.warn(f"{self!r} was never acknowledged", ResourceWarning)


cdef int _acknowledge(AsyncEvent event) except -1:
    # Call the acknowledging verb and release the event's handle; the caller has set `_unacknowledged` to 0.
    event._pinned_handle.context.table.ack_async_event(&event.event)
    gate_leave_many(&event._pinned_handle._async_events, 1)
    event._pinned_handle._leave()
    return 0


cdef AsyncEvent _take_event(Context context):
    # Return the next event, to be acknowledged; None if none is waiting. Raise VerbsError if the verb fails.
    cdef AsyncEvent taken = AsyncEvent.__new__(AsyncEvent)  # created first: a taken event must not be lost
    cdef Handle held
    cdef int error
    while True:
        if context.table.get_async_event(context.pointer, &taken.event):
            error = errno
            if error == EAGAIN:
                return None
            raise VerbsError("ibv_get_async_event", error)
        taken.element = _element(&taken.event)
        held = taken.element if taken.element is not None else context
        if gate_hold(&held._gate):        # left by the acknowledgement
            gate_enter(&held._async_events)
            gate_enter(&taken._unacknowledged)
            taken._pinned_handle = held
            taken.event_type = _event_types.get(<int>taken.event.event_type, <int>taken.event.event_type)
            if <int>taken.event.event_type in _port_events:
                taken.port_num = taken.event.element.port_num
            return taken
        # The object is being destroyed: the destroying verb waits for this event.
        context.table.ack_async_event(&taken.event)


cdef Handle _element(v.ibv_async_event *event):
    # Return the handle of the event's queue pair, completion queue or shared receive queue; None if the event is about
    # none of those, or if the object has no handle. The context field of an object is its handle, if the object has
    # one: other code may have made objects on an adopted context. The ledger holds handles by address, and keeps each
    # alive until its destroying verb has returned.
    kind = _element_kinds.get(<int>event.event_type)
    if kind is None:
        return None
    if kind is QueuePair:
        found = _ledger.get(<uintptr_t>event.element.qp.qp_context)
        return found if isinstance(found, kind) and (<QueuePair>found).pointer == event.element.qp else None
    if kind is CompletionQueue:
        found = _ledger.get(<uintptr_t>event.element.cq.cq_context)
        return found if isinstance(found, kind) and (<CompletionQueue>found).pointer == event.element.cq else None
    found = _ledger.get(<uintptr_t>event.element.srq.srq_context)
    return found if isinstance(found, kind) and (<SharedReceiveQueue>found).pointer == event.element.srq else None
