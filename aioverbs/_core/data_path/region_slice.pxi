# Part of work.pyx: memory as work requests name it, and what is under way with it.

@cython.no_gc_clear                 # what has to be counted back is there until it was
cdef class InFlightCount:
    """How many work requests have the use of some memory. They are counted for the memory that it is a part of, too.

    Any thread counts: the GIL is kept from one line of a method to its last, or this object's section where there is
    none. Whoever closes it and then looks at the count misses nothing: an addition comes before, and is counted, or
    after, and is refused.

    :param parent: of the memory that this is a part of.
    :param idle: called each time that nothing is under way any more, in whatever thread that is; it must not raise.
    """

    cdef Py_ssize_t _count
    cdef Py_ssize_t _receives           # of these
    cdef bint _closed
    cdef object _idle
    cdef object _condition
    cdef readonly InFlightCount parent
    cdef uint32_t _forks                # when it was made

    def __init__(self, InFlightCount parent=None, idle=None):
        self.parent = parent
        self._forks = Affinity._fork_count()
        self._idle = idle

    def __len__(self):
        return self._count

    def __bool__(self):
        return self._count > 0

    @property
    def receives(self):
        """How many of them are receives, which end when a message comes, or when their queue is closed."""
        return self._receives

    @property
    def condition(self):
        """Rung each time that nothing is under way any more; None: nobody waits."""
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
        """Whether these are of the process that this one was forked from."""
        return self._forks != Affinity._fork_count()

    @property
    def closed(self):
        """Whether these were closed; the memory that this is a part of may be, without them."""
        return self._closed

    def close(self):
        """Let no work request have the use of the memory any more, beyond those that have it."""
        self._set_closed(True)

    def check(self):
        """Whether something may be done with the memory.

        :raises ClosedResourceError: it is not registered any more, or was given back.
        """
        self._check()

    def reopen(self):
        """Take `close` back."""
        self._set_closed(False)

    def add(self):
        """A work request, or anything else, has the use of the memory.

        :raises ClosedResourceError: it is closed.
        """
        self._add(1, 0)

    def discard(self):
        """It is over; once for each `add`."""
        self._discard(1, 0)

    @cython.final
    cdef int _set_closed(self, bint closed) except -1:
        cdef section within
        section_enter(&within, <PyObject *>self)
        self._closed = closed
        section_leave(&within)
        return 0

    @cython.final
    cdef int _check(self) except -1:
        if self._closed and self.parent is not None:
            raise ClosedResourceError("this buffer was released to its pool: lease another one")
        if self._closed:
            raise ClosedResourceError("the memory is not registered any more, or about to be closed")
        return 0 if self.parent is None else self.parent._check()

    @cython.final
    cdef inline int _add(self, Py_ssize_t count, Py_ssize_t receives) except -1:
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
        # It was closed meanwhile, by another thread, after the parent counted.
        if self.parent is not None:
            self.parent._discard(count, receives)
        self._check()
        return self._add(count, receives)   # and opened again

    @cython.final
    cdef int _discard(self, Py_ssize_t count, Py_ssize_t receives) except -1:
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
        condition = self._get_condition()
        if condition is not None:
            condition.notify()
        if self._idle is not None:
            self._idle()
        return 0


@cython.final
cdef class _Run:
    """So many requests, one after the other, with the use of one piece of memory."""

    cdef InFlightCount pins
    cdef Py_ssize_t count


cdef class Registered:
    """Base of what is one registered piece."""

    # Not a slice of all of it, which would hold it: whoever forgets it is to be heard at once.
    cdef InFlightCount _pins
    cdef MemoryRegion _handle           # from its opening on
    cdef int _access
    cdef uint64_t _address
    cdef Py_ssize_t _length
    cdef uint32_t _lkey
    cdef uint32_t _rkey

    @property
    def whole(self):
        """All of it.

        :raises ClosedResourceError: it was not opened yet.
        """
        return _whole_of(self)

    def __getitem__(self, key):
        """A part of it, without a copy.

        :raises IndexError: the part does not lie inside.
        """
        return _whole_of(self)[key]


cdef class RegionSlice:
    """A part of a memory region, without a copy.

    :param region: the `MemoryRegion` that it is a part of, which is open.
    :param offset: of its first byte in there.
    :param length: in bytes.
    :param pins: what is under way with it; None: those of the region.
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
            raise IndexError(f"{length} bytes from {offset} on do not lie in the {whole.length} bytes of {region!r}")
        self._set_part(whole, offset, length)
        if pins is not None:
            self.pins = pins

    cdef int _set_part(self, RegionSlice whole, Py_ssize_t offset, Py_ssize_t length) except -1:
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
        """All of a region that is being opened."""
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
        cdef uint64_t start = 0, length = 0
        cdef RegionSlice part = RegionSlice.__new__(RegionSlice)
        _slice_bounds(key, self.length, self, &start, &length)
        part._set_part(self, start, length)
        return part

    cdef int _check_open(self) except -1:
        self.pins.check()
        self._handle._enter_memory()
        self._handle._leave()
        return _check_borrowed(self._handle)

    @property
    def address(self):
        """Of its first byte."""
        self._check_open()
        return self._address

    @property
    def sge(self):
        """Its scatter/gather entry: address, length and lkey."""
        self._check_open()
        return self._address, self.length, self._lkey

    @property
    def buffer(self):
        """Its bytes."""
        self._check_open()
        return self.region.buffer[self.offset : self.offset + self.length]

    def remote(self):
        """What a peer needs to reach it, a `RemoteRegion`."""
        self._check_open()
        return RemoteRegion(self._address, self.length, self._rkey)


cdef RegionSlice _whole_of(Registered region):
    cdef RegionSlice whole
    if region._handle is None:
        raise ClosedResourceError(f"{region!r} is not open")
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
    # A lender's own pointer tells whether he closed it.
    if handle._lender_slot != NULL and handle._lender_slot[0] != handle._lent_pointer:
        raise BorrowedObjectClosedError(repr(handle))
    return 0


cdef class RemoteRegion:
    """Memory of a peer: where it is, how long it is, and the key that opens it. Immutable.

    ``len()`` raises `OverflowError` where `length` exceeds ``sys.maxsize``, as it may: a peer can register all of its
    address space. Everything else goes by `length`.

    :param address: of its first byte, in the peer's address space.
    :param length: in bytes.
    :param rkey: the key of the peer's region or window.
    :raises ValueError: one of them is no number of its size, or the memory leaves the address space.
    """

    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly uint32_t rkey

    def __init__(self, address, length, rkey):
        self.address = _uint(address, 64, "address")
        self.length = _uint(length, 64, "length")
        self.rkey = _uint(rkey, 32, "rkey")
        if self.length and self.address + (self.length - 1) < self.address:
            raise ValueError(f"{length} bytes at {address:#x} leave the address space")

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
        return self.address, self.length, self.rkey

    def __len__(self):
        if self.length > <uint64_t>sys.maxsize:
            raise OverflowError(f"{self!r} is longer than len() can tell: see `length`")
        return self.length

    def __bool__(self):
        return self.length > 0

    def __getitem__(self, key):
        """A part of it.

        :raises IndexError: the part does not lie inside.
        """
        cdef uint64_t start = 0, length = 0
        cdef RemoteRegion part = RemoteRegion.__new__(RemoteRegion)
        _slice_bounds(key, self.length, self, &start, &length)
        part.address = self.address + start
        part.length = length
        part.rkey = self.rkey
        return part

    def __bytes__(self):
        """Its wire form, 20 bytes in network order: address, length, key."""
        return _WIRE.pack(self.address, self.length, self.rkey)

    @classmethod
    def from_bytes(cls, data):
        """From its wire form.

        :raises ValueError: it is none.
        """
        view = memoryview(data).cast("B")
        if len(view) != _WIRE.size:
            raise ValueError(f"a remote region is {_WIRE.size} bytes on the wire, not {len(view)}")
        return cls(*_WIRE.unpack(view))


_WIRE = struct.Struct(">QQI")


cdef extern from "Python.h":
    int PySlice_Unpack(object key, Py_ssize_t *first, Py_ssize_t *last, Py_ssize_t *step) except -1


cdef int _slice_bounds(object key, uint64_t length, object what, uint64_t *start, uint64_t *size) except -1:
    # What a slice cut off silently would be read or written wrongly: it must lie inside.
    cdef Py_ssize_t begin, end, step, whole
    # The usual way: numbers as they should be. What is larger than this type has becomes its largest value.
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
        raise ValueError(f"a slice of {what!r} is one piece: no step, not {key.step}")
    first = 0 if key.start is None else key.start
    last = length if key.stop is None else key.stop
    first, last = (each + length if each < 0 else each for each in (first, last))
    if not 0 <= first <= last <= length:
        raise IndexError(f"[{key.start}:{key.stop}] does not lie in the {length} bytes of {what!r}")
    start[0] = first
    size[0] = last - first
    return 0
