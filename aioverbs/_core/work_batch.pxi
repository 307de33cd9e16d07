# Part of work.pyx: many requests with one doorbell and one completion.

@cython.final
cdef class Batch(Sending):
    """Requests that are posted together: one doorbell, one completion, one await. `QueuePair.batch` makes it.

    Its methods are those of the queue pair. What they return tells its result when the batch is done; it is not awaited
    itself. Nothing is under way, and no memory is kept from being closed, until it is posted.
    """

    cdef list elements
    cdef Operation operation            # since it was posted

    def __init__(self, Requester queue_pair not None):
        if queue_pair._requests is None:
            raise ClosedResourceError(f"{queue_pair!r} is not open")
        self._requests = queue_pair._requests
        self._loose = True
        self.elements = []

    def __len__(self):
        return len(self.elements)

    def __repr__(self):
        return f"<Batch of {len(self.elements)} for {self._requests.handle!r}>"

    cdef int _go(self, Operation operation, bint nowait) except -1:
        if self.operation is not None:
            raise RuntimeError(f"{self!r} was posted: make a new one")
        if len(self.elements) == SLOTS_ELEMENTS:
            raise ValueError(f"a batch has {SLOTS_ELEMENTS} requests at most: post it, and begin another")
        operation.phase = PART
        self.elements.append(operation)
        return 0

    def post(self):
        """Post all of it, once; awaiting what this returns waits for all.

        Where requests failed that raises `BatchError`: which one was the first, and what became of the others.

        :raises ValueError: there is nothing in it, or more than the send queue has places.
        """
        return self._post(False)

    def post_nowait(self):
        """`post`, where there are places for all; `anyio.WouldBlock` is raised where there are not."""
        return self._post(True)

    cdef Operation _post(self, bint nowait):
        cdef Requests requests = _entered(self, "ibv_post_send")
        cdef Operation operation
        try:
            if self.operation is not None:
                raise RuntimeError(f"{self!r} was posted: make a new one")
            if not self.elements:
                raise ValueError("there is nothing in the batch")
            operation = _new(requests.send_queue)
            operation.elements = self.elements
            operation.requests = len(self.elements)
            self._fasten()
            try:
                for each in self.elements:
                    operation.bytes += (<Operation>each).bytes
                Sending._go(self, operation, nowait)
            except BaseException:
                for each in self.elements:
                    (<Operation>each)._loosen()
                raise
            self.operation = operation
        finally:
            requests.handle._unuse()
        return operation

    cdef int _fasten(self) except -1:
        cdef int done = 0
        try:
            for each in self.elements:
                (<Operation>each)._fasten()
                done += 1
        except BaseException:
            for each in self.elements[:done]:
                (<Operation>each)._loosen()
            raise
        return 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, traceback):
        if kind is None and self.elements and self.operation is None:
            await self.post()


cdef v.ibv_send_wr *_linked(Operation batch) noexcept:
    # The chain of its requests; only the last one completes, unless one fails.
    cdef Operation element, before = None
    cdef uint32_t index = 0
    for each in batch.elements:
        element = <Operation>each
        element.send_wr.wr_id = slots_with_element(batch.number, index)
        element.send_wr.next = NULL
        if before is not None:
            before.send_wr.next = &element.send_wr
        before = element
        index += 1
    before.send_wr.send_flags |= SIGNALED
    return &(<Operation>batch.elements[0]).send_wr


cdef int _partly(Operation batch, v.ibv_send_wr *bad, int error) noexcept:
    # The verb refused one in the middle. What it took has no completion of its own until the queue pair is flushed.
    cdef v.ibv_qp_attr attr
    cdef QueuePair handle = <QueuePair>batch.queue.handle
    cdef Operation element
    cdef bint refused = False
    for each in batch.elements:
        element = <Operation>each
        refused = refused or &element.send_wr == bad
        if refused:
            element.error = VerbsError("ibv_post_send", abs(error))
        else:
            batch.posted += 1
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = <v.ibv_qp_state><int>ERR
    return handle.context.table.modify_qp(handle.pointer, &attr, v.IBV_QP_STATE)


cdef bint _element_completed(Operation batch, v.ibv_wc *wc) except -1:
    # Whether that was the last of it.
    cdef uint32_t index = slots_element(wc.wr_id), last = (batch.posted or <uint32_t>len(batch.elements)) - 1
    cdef Operation element = <Operation>batch.elements[index]
    if <int>wc.status != SUCCESS:
        element.status = wc.status
        element.vendor_err = wc.vendor_err
        if batch.status == SUCCESS:
            batch.status = wc.status
            batch.vendor_err = wc.vendor_err
    return index == last


cdef int _end_elements(Operation batch) except -1:
    cdef Operation element
    for each in batch.elements:
        element = <Operation>each
        element.state = DONE
        if batch.error is not None and element.error is None:
            element.error = batch.error
        elif element.status == SUCCESS and element.error is None:
            element._take_old_value()
        element.keep = None
    return 0
