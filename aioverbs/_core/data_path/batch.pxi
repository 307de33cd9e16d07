# Part of data_path.pyx: many requests with one doorbell and one completion.

cdef enum:
    INITIAL_CAPACITY = 64               # number of requests that most batches do not exceed


@cython.final
cdef class Batch(SendVerbs):
    """Batch of requests with one doorbell, one completion and one await. Made by `QueuePair.batch`.

    Its methods are the send verbs of the queue pair, and each adds a request to the batch. The operations that they
    return cannot be awaited; their ``result()`` is valid when the batch is done. Until the batch is posted, no request
    is in flight and no memory is pinned.

    ``async with queue_pair.batch() as batch`` provides the batch, and posts and awaits it at the end of the block; see
    `post` for the errors. Nothing is posted at the end if the block raised, if the batch is empty, or if the block has
    already posted it.

    :raises ClosedResourceError: the queue pair is not open.
    """

    cdef list elements
    cdef Py_ssize_t count               # number of elements
    cdef request *requests              # requests of the elements, until the batch is posted
    cdef Py_ssize_t capacity
    cdef list runs                      # memory of the elements, each a _Run
    cdef _Run last_run
    cdef uint64_t bytes
    cdef int scratch
    cdef Operation operation            # set when the batch is posted

    def __init__(self, QueuePairVerbs queue_pair not None):
        cdef section within
        cdef QpWorkState requests = _requests_of(queue_pair, &within)
        if requests is None:
            raise ClosedResourceError(
                f"{queue_pair!r} is not open: open it with `async with`, or create a new one if it was closed"
            )
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
        # Return the place in which to build the next request: in the batch's own memory, not in `wr`. Raise the errors
        # of `_grow`.
        cdef request *place
        if self.operation is None and self.count < self.capacity:
            place = &self.requests[self.count]
        else:
            place = self._grow()
        request_begin(place)
        return place

    cdef request *_grow(self) except NULL:
        # Make room for more requests and return the place of the next one. Raise RuntimeError if the batch was posted,
        # ValueError if it is full.
        cdef request *larger
        cdef Py_ssize_t capacity = min(2 * self.capacity + INITIAL_CAPACITY, SLOTS_ELEMENTS)
        if self.operation is not None:
            raise RuntimeError(f"{self!r} was posted before: create a new batch")
        if self.count == SLOTS_ELEMENTS:
            raise ValueError(f"a batch takes at most {SLOTS_ELEMENTS} requests: post it and start another one")
        larger = request_grow(self.requests, self.count, capacity)
        if larger == NULL:
            raise MemoryError
        self.requests = larger
        self.capacity = capacity
        return &larger[self.count]

    cdef int _submit_or_collect(self, Operation operation, request *wr, bint nowait) except -1:
        # Add the request, which `_place_for` placed, to the batch; nothing is posted.
        self.elements.append(operation)
        self.count += 1
        self.bytes += operation.bytes
        operation.phase = IN_BATCH
        if operation.scratch != UNUSED:
            self.scratch = BY_ELEMENTS
        # Most requests use the same memory as the request before them.
        if operation.extra is None and self.last_run is not None and self.last_run.pins is operation.pins:
            self.last_run.count += 1
            return 0
        for each in operation._all_pins():
            self.runs.append(each)
            self.last_run = <_Run>each
        return 0

    def post(self):
        """Post all requests of the batch, once. If the send queue has too few free places, the batch waits for them.

        :returns: an `Operation` that completes when all requests have completed. Awaiting it returns None; if requests
            failed, it raises a `BatchError` that names the first failure and contains the outcome of each request. See
            `Operation` for other exceptions of the await.
        :raises ValueError: the batch is empty, or has more requests than the send queue has places.
        :raises RuntimeError: the batch was posted before; nothing is done.
        :raises ClosedResourceError: the queue pair, or memory of a request, is closed. See `SendVerbs` for further
            errors. After any error except RuntimeError, nothing is posted and the batch can still be posted.
        """
        return self._post(False)

    def post_nowait(self):
        """Post the batch as `post` does, but never wait for places in the send queue.

        :returns: the posted `Operation`.
        :raises anyio.WouldBlock: the send queue has too few free places for all requests; nothing is posted. Other
            errors are those of `post`.
        """
        return self._post(True)

    cdef Operation _post(self, bint nowait):
        # Do the work of `post`, or of `post_nowait` if `nowait` is set.
        cdef section within
        cdef QpWorkState requests = _begin_posting(self, "ibv_post_send", &within)
        cdef Operation operation
        try:
            if self.operation is not None:
                raise RuntimeError(f"{self!r} was posted before: create a new batch")
            if not self.elements:
                raise ValueError("the batch is empty: add a request before posting it")
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
        # Pin the memory of all requests. If the memory of one of them is closed, pin none and raise
        # ClosedResourceError.
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
        """Return this batch."""
        return self

    async def __aexit__(self, kind, error, traceback):
        """Post the batch and await it, unless the block raised, the batch is empty, or the block has posted it.

        :raises BatchError: requests failed. Other errors are those of `post`.
        """
        if kind is None and self.elements and self.operation is None:
            await self.post()


cdef int _number_elements(Operation batch) noexcept:
    # Put the index of each request into its wr_id, so that its completion identifies the request.
    cdef uint32_t at
    for at in range(batch.requests):
        batch.extra.requests[at].send.wr_id = slots_with_element(batch.wr_id, at)
    return 0


cdef int _batch_refused(Operation batch, request *wr, v.ibv_send_wr *bad, int error) noexcept:
    # The verb refused a request in the middle: the last request, whose completion would have reported the accepted
    # ones, is not posted. Fail the elements and the batch, whose place stays taken until the queue pair is reset.
    # Return 0, which tells the caller that requests were posted.
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
    # Record the completion of one of the batch's requests. Return whether it was the last request.
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
    # Complete the elements, with their results or the batch's failure. The results of atomic requests are in scratch
    # memory, which is soon reused.
    cdef Operation element
    for each in batch.extra.elements:
        element = <Operation>each
        if batch.raises and not element.raises:
            element._fail(batch.value)
        elif element.status == SUCCESS and not element.raises:
            element._take_old_value()
        byte_write(&element.state, DONE)
    return 0
