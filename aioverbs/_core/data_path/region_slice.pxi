# Part of data_path.pyx: memory in work requests, and counters of the requests in flight that use it.

@cython.no_gc_clear                 # its references are there until everything is counted back
cdef class InFlightCount:
    """Number of work requests in flight that use a piece of memory. They are also counted for the parent memory, which
    contains that piece.

    Any thread may count: a method holds the GIL from its first line to its last, or this object's section if there is
    no GIL. A thread that closes the counter and then reads it misses nothing: a concurrent `add` either comes before
    and is counted, or comes after and is refused.

    :param parent: counter of the memory that this memory is a part of; None if there is none.
    :param idle: called without arguments each time that the count falls to 0, in any thread; must not raise.
    """

    cdef Py_ssize_t _count
    cdef Py_ssize_t _receives           # number of receives among them
    cdef bint _closed
    cdef object _idle
    cdef object _condition
    cdef readonly InFlightCount parent
    cdef uint32_t _forks                # fork count at its creation

    def __init__(self, InFlightCount parent=None, idle=None):
        self.parent = parent
        self._forks = Affinity._fork_count()
        self._idle = idle

    def __len__(self):
        """Return the count: the number of requests in flight, plus other users of the memory that `add` counted."""
        return self._count

    def __bool__(self):
        """Return whether the count is not 0, that is, whether the memory has any user."""
        return self._count > 0

    @property
    def receives(self):
        """Number of receives among the requests in flight. A receive ends when a message arrives or its queue is
        closed."""
        return self._receives

    @property
    def condition(self):
        """Condition whose ``notify()`` is called each time that the count falls to 0, in any thread; None if there is
        none. It can be set."""
        return self._get_condition()

    @condition.setter
    def condition(self, condition):
        cdef section within
        section_enter(&within, <PyObject *>self)
        before, self._condition = self._condition, condition
        section_leave(&within)

    @cython.final
    cdef object _get_condition(self):
        cdef section within
        section_enter(&within, <PyObject *>self)
        condition = self._condition
        section_leave(&within)
        return condition

    @property
    def inherited(self):
        """Whether the counter was created in the parent process, before this process was forked."""
        return self._forks != Affinity._fork_count()

    @property
    def closed(self):
        """Whether `close` was called on this counter. The counter of the parent memory may be closed independently."""
        return self._closed

    def close(self):
        """Refuse further use of the memory: `check` and `add` raise ClosedResourceError. Requests in flight
        continue."""
        self._set_closed(True)

    def check(self):
        """Check that the memory, and the parent memory that contains it, may be used.

        :raises ClosedResourceError: this counter or the counter of the parent memory is closed: the memory is no longer
            registered, or was released to its pool.
        """
        self._check()

    def reopen(self):
        """Undo `close`: the memory may be used again."""
        self._set_closed(False)

    def add(self):
        """Count one more user of the memory: a work request, or any other use.

        :raises ClosedResourceError: this counter or the counter of the parent memory is closed; nothing is counted.
        """
        self._add(1, 0)

    def discard(self):
        """Count one user fewer. Call this once for each `add`. If the count falls to 0, notify the `condition` and call
        the callback ``idle``, if there are any."""
        self._discard(1, 0)

    @cython.final
    cdef int _set_closed(self, bint closed) except -1:
        # Close or reopen the counter; a concurrent `_add` takes effect as a whole before or after that.
        cdef section within
        section_enter(&within, <PyObject *>self)
        self._closed = closed
        section_leave(&within)
        return 0

    @cython.final
    cdef int _check(self) except -1:
        # Raise ClosedResourceError if this counter or a parent is closed.
        if self._closed and self.parent is not None:
            raise ClosedResourceError("this buffer was released to its pool: lease another one")
        if self._closed:
            raise ClosedResourceError("the memory is deregistered, or about to be: register it again")
        return 0 if self.parent is None else self.parent._check()

    @cython.final
    cdef inline int _add(self, Py_ssize_t count, Py_ssize_t receives) except -1:
        # Count `count` more users, `receives` of them receives, here and in the parents, or raise as `_check` does.
        cdef section within
        cdef bint closed
        if self._closed:
            self._check()
        if self.parent is not None:
            self.parent._add(count, receives)
        section_enter(&within, <PyObject *>self)
        closed = FREE_THREADED and self._closed
        if not closed:
            self._count += count
            self._receives += receives
        section_leave(&within)
        return self._undo_add(count, receives) if closed else 0

    @cython.final
    cdef int _undo_add(self, Py_ssize_t count, Py_ssize_t receives) except -1:
        # Undo the parents' part of `_add`, because another thread closed this counter in between; then raise as
        # `_check` does.
        if self.parent is not None:
            self.parent._discard(count, receives)
        self._check()
        return self._add(count, receives)   # reopened in the meantime

    @cython.final
    cdef int _discard(self, Py_ssize_t count, Py_ssize_t receives) except -1:
        # Undo `_add`. If the count falls to 0, call the callbacks.
        cdef section within
        cdef bint idle
        section_enter(&within, <PyObject *>self)
        self._count -= count
        self._receives -= receives
        idle = not self._count and (self._condition is not None or self._idle is not None)
        section_leave(&within)
        if self.parent is not None:
            self.parent._discard(count, receives)
        if idle:
            self._is_idle()
        return 0

    @cython.final
    cdef int _is_idle(self) except -1:
        # Notify the condition and call the callback: the count has fallen to 0.
        condition = self._get_condition()
        if condition is not None:
            condition.notify()
        if self._idle is not None:
            self._idle()
        return 0


@cython.final
@cython.no_gc_clear                 # as InFlightCount
cdef class _Run:
    """A number of consecutive requests that use the same memory."""

    cdef InFlightCount pins
    cdef Py_ssize_t count


cdef class Registered:
    """Base class of memory that is registered as one piece."""

    # Not a `RegionSlice` of the whole: the slice would keep this object alive, and a dropped region must be noticed
    # immediately.
    cdef InFlightCount _pins
    cdef MemoryRegion _handle           # set when the region opens
    cdef int _access
    cdef uint64_t _address
    cdef Py_ssize_t _length
    cdef uint32_t _lkey
    cdef uint32_t _rkey

    @property
    def whole(self):
        """The whole memory, as a new `RegionSlice`.

        :raises ClosedResourceError: the region is not open.
        """
        return _whole_of(self)

    def __getitem__(self, key):
        """Return a part of the memory, a new `RegionSlice`, without a copy.

        A slice that exceeds the memory is an error. It is not cut off at the end, as Python does with a sequence: the
        device would transfer fewer bytes than the program means.

        :param key: a slice without a step. Negative numbers count from the end.
        :raises ClosedResourceError: the region is not open.
        :raises TypeError: `key` is not a slice.
        :raises ValueError: `key` has a step.
        :raises IndexError: the part does not lie inside the memory.
        """
        return _whole_of(self)[key]


cdef class RegionSlice:
    """Part of a memory region, without a copy.

    Made by slicing a region or another slice. Its properties and `remote` raise `ClosedResourceError` after the region
    is closed, or the buffer was released to its pool.

    :param region: the open `MemoryRegion`.
    :param offset: offset of the first byte in the region, in bytes.
    :param length: length in bytes.
    :param pins: counter of the requests in flight that use this part; None for the region's counter.
    :raises ClosedResourceError: the region is not open.
    :raises IndexError: the part does not lie inside the region.
    """

    cdef readonly object region
    cdef readonly InFlightCount pins
    cdef readonly Py_ssize_t offset
    cdef readonly Py_ssize_t length
    cdef MemoryRegion _handle
    cdef uint64_t _address
    cdef uint32_t _lkey
    cdef uint32_t _rkey
    cdef int _access

    def __init__(self, Registered region not None, Py_ssize_t offset, Py_ssize_t length, InFlightCount pins=None):
        cdef RegionSlice whole = _whole_of(region)
        if offset < 0 or length < 0 or offset + length > whole.length:
            raise IndexError(f"{length} bytes at offset {offset} exceed the {whole.length} bytes of {region!r}")
        self._set_part(whole, offset, length)
        if pins is not None:
            self.pins = pins

    cdef int _set_part(self, RegionSlice whole, Py_ssize_t offset, Py_ssize_t length) except -1:
        # Make this the part of `whole` at `offset`, which the caller has checked.
        self.region = whole.region
        self.pins = whole.pins
        self._handle = whole._handle
        self._access = whole._access
        self._lkey = whole._lkey
        self._rkey = whole._rkey
        self._address = whole._address + offset
        self.offset = whole.offset + offset
        self.length = length
        return 0

    @staticmethod
    def of_all(Registered region not None, MemoryRegion handle not None, InFlightCount pins not None, int access):
        """Make a region that is being opened refer to its handle, counter and access flags.

        :param region: the region, which is changed.
        :param handle: handle of the memory region (``struct ibv_mr``).
        :param pins: counter of the requests in flight that use the region.
        :param access: access flags with which the region was registered.
        :returns: a new `RegionSlice` of the whole region.
        :raises ClosedResourceError: `handle` is closed.
        """
        region._pins = pins
        region._handle = handle
        region._access = access
        region._address = handle.address
        region._length = handle.length
        region._lkey = handle.lkey
        region._rkey = handle.rkey
        return _whole_of(region)

    def __repr__(self):
        return f"<{self.region!r}[{self.offset}:{self.offset + self.length}]>"

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        """Return a part of this part, a new `RegionSlice`. The region need not be open.

        :param key: a slice without a step, which is not cut off at the end. Negative numbers count from the end.
        :raises TypeError: `key` is not a slice.
        :raises ValueError: `key` has a step.
        :raises IndexError: the part does not lie inside this part.
        """
        cdef uint64_t start = 0, length = 0
        cdef RegionSlice part = RegionSlice.__new__(RegionSlice)
        _slice_bounds(key, self.length, self, &start, &length)
        part._set_part(self, start, length)
        return part

    cdef int _check_open(self) except -1:
        # Raise ClosedResourceError, or a subclass, if the memory may no longer be used.
        self.pins.check()
        self._handle._enter_memory()
        self._handle._leave()
        return _check_borrowed(self._handle)

    @property
    def address(self):
        """Address of the first byte, an int.

        :raises ClosedResourceError: the region is closed, or the buffer was released to its pool.
        """
        self._check_open()
        return self._address

    @property
    def sge(self):
        """Scatter/gather entry (``struct ibv_sge``) for the memory, a tuple of its address, length in bytes and lkey.

        :raises ClosedResourceError: the region is closed, or the buffer was released to its pool.
        """
        self._check_open()
        return self._address, self.length, self._lkey

    @property
    def buffer(self):
        """A `memoryview` of the bytes, without a copy.

        :raises ClosedResourceError: the region is closed, or the buffer was released to its pool.
        """
        self._check_open()
        return self.region.buffer[self.offset : self.offset + self.length]

    def remote(self):
        """Return a new `RemoteRegion` for this memory, which the caller sends to a peer that is to access the memory.

        :raises ClosedResourceError: the region is closed, or the buffer was released to its pool.
        """
        self._check_open()
        return RemoteRegion(self._address, self.length, self._rkey)


cdef RegionSlice _whole_of(Registered region):
    # Return a new slice of the whole region. Raise ClosedResourceError if the region is not open.
    cdef RegionSlice whole
    if region._handle is None:
        raise ClosedResourceError(
            f"{region!r} is not open: open it with `async with`, or create a new one if it was closed"
        )
    whole = RegionSlice.__new__(RegionSlice)
    whole.region = region
    whole.pins = region._pins
    whole._handle = region._handle
    whole._access = region._access
    whole._lkey = region._lkey
    whole._rkey = region._rkey
    whole._address = region._address
    whole.length = region._length
    return whole


cdef int _check_borrowed(MemoryRegion handle) except -1:
    # Raise BorrowedObjectClosedError if a lender has closed the region, which shows in the lender's own pointer.
    if handle._lender_slot != NULL and handle._lender_slot[0] != handle._lent_pointer:
        raise BorrowedObjectClosedError(repr(handle))
    return 0


cdef class RemoteRegion:
    """Memory of a peer: address, length and remote key. Immutable, and equal to another one with the same numbers.

    ``len()`` raises `OverflowError` if `length` exceeds ``sys.maxsize``, which is possible because a peer can register
    its whole address space. All other methods use `length`.

    :param address: address of the first byte in the peer's address space, 0..2**64-1.
    :param length: length in bytes, 0..2**64-1.
    :param rkey: remote key of the peer's memory region or memory window, 0..2**32-1.
    :raises ValueError: a number does not fit in its width, or the memory exceeds the address space.
    """

    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly uint32_t rkey

    def __init__(self, address, length, rkey):
        self.address = _uint(address, 64, "address")
        self.length = _uint(length, 64, "length")
        self.rkey = _uint(rkey, 32, "rkey")
        if self.length and self.address + (self.length - 1) < self.address:
            raise ValueError(f"{length} bytes at {address:#x} exceed the address space")

    def __repr__(self):
        return f"RemoteRegion(address={self.address:#x}, length={self.length}, rkey={self.rkey:#x})"

    def __eq__(self, other):
        if not isinstance(other, RemoteRegion):
            return NotImplemented
        return self._key() == (<RemoteRegion>other)._key()

    def __hash__(self):
        return hash(self._key())

    def __reduce__(self):
        return RemoteRegion, self._key()

    cdef tuple _key(self):
        # Return the numbers that equality and the hash depend on.
        return self.address, self.length, self.rkey

    def __len__(self):
        """Return the length in bytes.

        :raises OverflowError: the length exceeds ``sys.maxsize``.
        """
        if self.length > <uint64_t>sys.maxsize:
            raise OverflowError(f"{self!r} exceeds the limit of len(): use `length`")
        return self.length

    def __bool__(self):
        return self.length > 0

    def __getitem__(self, key):
        """Return a part of the memory, a new `RemoteRegion`.

        :param key: a slice without a step, which is not cut off at the end. Negative numbers count from the end.
        :raises TypeError: `key` is not a slice.
        :raises ValueError: `key` has a step.
        :raises IndexError: the part does not lie inside the memory.
        """
        cdef uint64_t start = 0, length = 0
        cdef RemoteRegion part = RemoteRegion.__new__(RemoteRegion)
        _slice_bounds(key, self.length, self, &start, &length)
        part.address = self.address + start
        part.length = length
        part.rkey = self.rkey
        return part

    def __bytes__(self):
        """Return the wire format, 20 bytes in network byte order: address (8 bytes), length (8 bytes) and rkey (4
        bytes)."""
        return _WIRE.pack(self.address, self.length, self.rkey)

    @classmethod
    def from_bytes(cls, data):
        """Decode the wire format that ``bytes(remote_region)`` returns.

        :param data: 20 bytes, any object with the buffer protocol.
        :returns: a new `RemoteRegion`.
        :raises TypeError: `data` does not support the buffer protocol, or is not contiguous.
        :raises ValueError: `data` is not 20 bytes long, or does not describe a valid region.
        """
        view = memoryview(data).cast("B")
        if len(view) != _WIRE.size:
            raise ValueError(f"the wire format of a remote region has {_WIRE.size} bytes, got {len(view)}")
        return cls(*_WIRE.unpack(view))


_WIRE = struct.Struct(">QQI")


cdef extern from "Python.h":
    int PySlice_Unpack(object key, Py_ssize_t *first, Py_ssize_t *last, Py_ssize_t *step) except -1


cdef int _slice_bounds(object key, uint64_t length, object what, uint64_t *start, uint64_t *size) except -1:
    # Set `start` and `size` to the part of `length` bytes that a slice selects. Raise TypeError, ValueError or
    # IndexError, naming `what`. A slice that is silently cut off would make the device access the wrong memory: the
    # part must lie inside.
    cdef Py_ssize_t begin, end, step, whole
    # Fast path: integers in range. PySlice_Unpack clamps a larger one to the largest value of the type.
    if isinstance(key, slice) and length < <uint64_t>PY_SSIZE_T_MAX:
        PySlice_Unpack(key, &begin, &end, &step)
        whole = <Py_ssize_t>length
        if begin < 0:
            begin += whole
        if end < 0:
            end += whole
        elif end == PY_SSIZE_T_MAX and key.stop is None:
            end = whole
        if step == 1 and 0 <= begin <= end <= whole:
            start[0] = begin
            size[0] = end - begin
            return 0
    if not isinstance(key, slice):
        raise TypeError(f"{what!r} is sliced, as [{key}:{key + 1}], not indexed")
    if key.step is not None and key.step != 1:
        raise ValueError(f"a slice of {what!r} takes no step, got {key.step}")
    first = 0 if key.start is None else key.start
    last = length if key.stop is None else key.stop
    first, last = (each + length if each < 0 else each for each in (first, last))
    if not 0 <= first <= last <= length:
        bounds = ":".join("" if each is None else str(each) for each in (key.start, key.stop))
        raise IndexError(
            f"[{bounds}] exceeds the {length} bytes of {what!r}: slices of memory are not cut off at the end as those "
            "of sequences are"
        )
    start[0] = first
    size[0] = last - first
    return 0
