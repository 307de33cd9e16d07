# Part of work.pyx: many requests with one doorbell and one completion.

cdef enum:
    INITIAL_CAPACITY = 64               # for requests at first: few batches need more


@cython.final
cdef class Batch(SendVerbs):
    """Requests that are posted together: one doorbell, one completion, one await. `QueuePair.batch` makes it.

    Its methods are those of the queue pair. What they return tells its result when the batch is done; it is not awaited
    itself. Nothing is under way, and no memory is kept from being closed, until it is posted.
    """

    cdef list elements
    cdef Py_ssize_t count               # of these
    cdef request *requests              # of these, until they are posted
    cdef Py_ssize_t capacity
    cdef list runs                      # what memory they have
    cdef _Run last_run
    cdef uint64_t bytes
    cdef int scratch
    cdef Operation operation            # since it was posted

    def __init__(self, QueuePairVerbs queue_pair not None):
        cdef section within
        cdef QpWorkState requests = _requests_of(queue_pair, &within)
        if requests is None:
            raise ClosedResourceError(f"{queue_pair!r} is not open")
        self._requests = requests
        self._pin_at_post = True
        self.elements = []
        self.runs = []
        self.scratch = UNUSED

    def __dealloc__(self):
        free(self.requests)

    def __len__(self):
        return len(self.elements)

    def __repr__(self):
        return f"<Batch of {len(self.elements)} for {self._requests.handle!r}>"

    cdef request *_place_for(self, request *wr) except NULL:
        cdef request *place
        if self.operation is None and self.count < self.capacity:
            place = &self.requests[self.count]
        else:
            place = self._grow()
        request_begin(place)
        return place

    cdef request *_grow(self) except NULL:
        cdef request *larger
        cdef Py_ssize_t capacity = min(2 * self.capacity + INITIAL_CAPACITY, SLOTS_ELEMENTS)
        if self.operation is not None:
            raise RuntimeError(f"{self!r} was posted: make a new one")
        if self.count == SLOTS_ELEMENTS:
            raise ValueError(f"a batch has {SLOTS_ELEMENTS} requests at most: post it, and begin another")
        larger = request_grow(self.requests, self.count, capacity)
        if larger == NULL:
            raise MemoryError
        self.requests = larger
        self.capacity = capacity
        return &larger[self.count]

    cdef int _submit_or_collect(self, Operation operation, request *wr, bint nowait) except -1:
        self.elements.append(operation)
        self.count += 1
        self.bytes += operation.bytes
        operation.phase = IN_BATCH
        if operation.scratch != UNUSED:
            self.scratch = BY_ELEMENTS
        # Most requests have the memory of those before them.
        if operation.extra is None and self.last_run is not None and self.last_run.pins is operation.pins:
            self.last_run.count += 1
            return 0
        for each in operation._all_pins():
            self.runs.append(each)
            self.last_run = <_Run>each
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
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_send", &within)
        cdef Operation operation
        try:
            if self.operation is not None:
                raise RuntimeError(f"{self!r} was posted: make a new one")
            if not self.elements:
                raise ValueError("there is nothing in the batch")
            operation = _new(requests.send_queue, 0, False)
            operation.requests = self.count
            operation.bytes = self.bytes
            operation.scratch = self.scratch
            _extra(operation).elements = self.elements
            operation.extra.pins = self.runs
            self._pin()
            operation.extra.requests, self.requests = self.requests, NULL
            try:
                SendVerbs._submit_or_collect(self, operation, operation.extra.requests, nowait)
            except BaseException:
                self.requests, operation.extra.requests = operation.extra.requests, NULL
                _discard_runs(self.runs, False)
                raise
            self.operation = operation
        finally:
            requests.handle._unuse()
            section_leave(&within)
        return operation

    cdef int _pin(self) except -1:
        # All of it, or nothing.
        cdef _Run run
        cdef Py_ssize_t pinned = 0
        try:
            for each in self.runs:
                run = <_Run>each
                run.pins._add(run.count, 0)
                pinned += 1
        except BaseException:
            _discard_runs(self.runs[:pinned], False)
            raise
        return 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, traceback):
        if kind is None and self.elements and self.operation is None:
            await self.post()


cdef int _number_elements(Operation batch) noexcept:
    cdef uint32_t at
    for at in range(batch.requests):
        batch.extra.requests[at].send.wr_id = slots_with_element(batch.wr_id, at)
    return 0


cdef int _batch_refused(Operation batch, request *wr, v.ibv_send_wr *bad, int error) noexcept:
    # The verb refused one in the middle: the last one, which would have told of those before it, is not posted.
    cdef Py_ssize_t accepted = _index_of_bad_wr(wr, batch.requests, bad)
    failure = VerbsError("ibv_post_send", abs(error))
    batch.queue.requests._lose_completions(failure)
    unknown = batch.queue.requests._unknown_outcome()
    for each in batch.extra.elements:
        (<Operation>each)._fail(failure if accepted <= 0 else unknown)
        accepted -= 1
    batch._fail(BatchError([(<Operation>each).value for each in batch.extra.elements]))
    return 0


cdef bint _element_completed(Operation batch, v.ibv_wc *wc) except -1:
    # Whether that was the last of it.
    cdef _Extra extra = batch.extra
    cdef uint32_t index = slots_element(wc.wr_id)
    cdef Operation element = <Operation>extra.elements[index]
    if <int>wc.status != SUCCESS and not element.raises:
        element.status = wc.status
        element.vendor_err = wc.vendor_err
        if batch.status == SUCCESS:
            batch.status = wc.status
            batch.vendor_err = wc.vendor_err
    return index == <uint32_t>len(extra.elements) - 1


cdef int _end_elements(Operation batch) except -1:
    # They are done. What atomics give is in memory that is another one's soon.
    cdef Operation element
    for each in batch.extra.elements:
        element = <Operation>each
        if batch.raises and not element.raises:
            element._fail(batch.value)
        elif element.status == SUCCESS and not element.raises:
            element._take_old_value()
        byte_write(&element.state, DONE)
    return 0
