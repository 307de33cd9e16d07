# Part of handles.pyx: affinity, the thread and event loop that may call the verbs of an object.

cdef object _get_running_loop = None            # asyncio's function, imported with the first affinity


cdef object _running_loop():
    # Return the event loop that runs in this thread; None if there is none.
    global _get_running_loop
    if _get_running_loop is None:
        _get_running_loop = importlib.import_module("asyncio")._get_running_loop
    return _get_running_loop()


cdef str _name_of_loop(object loop):
    return f"event loop {type(loop).__module__}.{type(loop).__qualname__} at {id(loop):#x}"


@cython.final
cdef class _ThreadEnd:
    # Stored in a thread-local variable of an owner's thread, to notice when that thread ends. Such variables are
    # deleted when the interpreter drops the thread state, which Thread.join waits for; before Python 3.13, it does not
    # wait for the end of the system's thread.
    cdef affinity_thread *thread

    def __dealloc__(self):
        if self.thread:
            affinity_thread_end(self.thread)
            affinity_thread_forget(self.thread)


cdef object _ends = threading.local()      # not a module variable: lasts as long as the process


cdef int _record_thread_end(affinity_thread *thread) except -1:
    # Make affinity_thread_ended return true for `thread`, the record of the current thread, after this thread has
    # ended.
    cdef _ThreadEnd end = getattr(_ends, "end", None)
    if end is None or end.thread != thread:
        end = _ThreadEnd.__new__(_ThreadEnd)
        end.thread = affinity_thread_remember(thread)
        _ends.end = end
    return 0


@cython.final
cdef class Affinity:
    """Owner of verbs objects: the thread and event loop that may call their verbs, one call at a time.

    `Affinity.of_running_loop` is for objects that take no locks: only the running loop's thread may call their verbs,
    while that loop is running. `Affinity.unbound` allows any thread. Both refuse a verb while another verb is in flight
    on any of the objects, whether the call comes from another thread or from inside that verb, for example from an
    allocator's callback.

    The handles of a domain are created with the affinity; each of their verbs checks it before the provider is called.
    """

    def __init__(self):
        raise TypeError("an Affinity comes from of_running_loop() or unbound()")

    def __dealloc__(self):
        if self._thread:
            affinity_thread_forget(<affinity_thread *>self._thread)

    @staticmethod
    cdef uint32_t _fork_count() noexcept:
        return fork_count

    @staticmethod
    def of_running_loop():
        """Return a new affinity that is owned by the running event loop and its thread.

        :raises RuntimeError: no asyncio event loop is running in this thread.
        :raises MemoryError: no memory is left for the thread's record.
        """
        cdef Affinity self = Affinity.__new__(Affinity)
        self._forks = fork_count
        self._bind()
        return self

    @staticmethod
    def unbound():
        """Return a new affinity without an owner: any thread may call verbs, one call at a time. Never fails."""
        cdef Affinity self = Affinity.__new__(Affinity)
        self._forks = fork_count
        return self

    cdef int _bind(self) except -1:
        # Make the running loop and its thread the owner. Raise RuntimeError if no asyncio loop is running in this
        # thread.
        cdef affinity_thread *thread = affinity_thread_self()
        loop = _running_loop()
        if not thread:
            raise MemoryError
        if loop is None:
            trio = sys.modules.get("trio")
            if trio is not None and trio.lowlevel.in_trio_task():
                raise RuntimeError("aioverbs needs an asyncio event loop, and this is a trio task")
            raise RuntimeError("no asyncio event loop is running in this thread: open this inside of a coroutine")
        _record_thread_end(thread)
        affinity_thread_remember(thread)
        if self._thread:
            affinity_thread_forget(<affinity_thread *>self._thread)
        self._thread = thread
        self._run = None
        self._version = 0
        self.loop = loop
        self.thread_name = threading.current_thread().name
        return 0

    @property
    def bound(self):
        """Whether the affinity has an owner, a thread and event loop; False if it was created by `unbound`."""
        return self._thread != NULL

    @property
    def thread_number(self):
        """Number of the owner's thread, which no other thread ever gets; None if there is no owner."""
        return (<affinity_thread *>self._thread).number if self._thread else None

    @property
    def inherited(self):
        """Whether the affinity was created in the parent process, before this process was forked."""
        return self._forks != fork_count

    @property
    def orphaned(self):
        """Whether the owner is gone, that is, its loop is closed or its thread has ended: no call can be in flight
        then.

        False if there is no owner. This can be read from any thread.
        """
        if not self._thread:
            return False
        return affinity_thread_ended(<affinity_thread *>self._thread) or self.loop.is_closed()

    def owns(self):
        """Return whether the caller runs in the owner's thread and event loop, so that it may call a verb if no other
        verb is in flight.

        If there is no owner, return True. In the child of a fork, return False in both cases.
        """
        return self._forks == fork_count and (self._thread == NULL or self._is_owner())

    def take_over(self):
        """Make the running loop and its thread the new owner, after the previous owner is gone: see `orphaned`.

        :raises AffinityError: the previous owner is not gone, or the affinity has no owner; nothing is changed.
        :raises RuntimeError: no asyncio event loop is running in this thread; nothing is changed.
        """
        if not self.orphaned:
            raise AffinityError(f"{self!r} still has an owner: close its objects there")
        self._bind()
        self._inside = 0

    def check(self, what, str verb not None):
        """Check that the caller may call a verb on an object now. Return None if so.

        :param what: the object, for the error message.
        :param verb: name of the verb, for the error message.
        :raises AffinityError: another thread or event loop is the owner.
        :raises ConcurrentAccessError: another verb is in flight.
        :raises ForkedProcessError: the affinity was created before a fork, in the parent process.
        """
        self._enter(what, verb)
        self._leave()

    # Pair each success of _enter with one _leave. With a bound affinity only the owner's thread gets as far as
    # `_inside`, which then detects re-entry; without an owner, threads claim `_inside` atomically. Raise the errors
    # that `check` lists.
    cdef int _enter(self, object what, str verb) except -1:
        if self._forks != fork_count:
            raise ForkedProcessError(repr(what))
        if _is_unchanged_owner(self._thread, self._inside, self._version):
            self._inside = 1
        elif self._thread:
            if not self._is_owner():
                raise AffinityError(self._wrong_caller_text(what, verb))
            if self._inside:
                raise ConcurrentAccessError(self._overlap_text(what, verb))
            self._inside = 1
        elif not affinity_claim(&self._inside):
            raise ConcurrentAccessError(self._overlap_text(what, verb))
        self._verb = <PyObject *>verb
        return 0

    cdef void _leave(self) noexcept:
        affinity_yield(&self._inside)

    cdef bint _is_owner(self) except -1:
        # Return whether this thread and its running loop are the owner; only for a bound affinity.
        cdef PyObject *run
        if affinity_thread_self() != self._thread:
            return False
        run = running_loop_run()
        if run and run == <PyObject *>self._run:
            self._version = running_loop_version()
            return True
        if _running_loop() is not self.loop:
            return False
        if run:
            self._run = <object>run                 # keeps the object alive, so that no other run gets its address
            self._version = running_loop_version()
        return True

    cdef bint _has_same_owner(self, Affinity other) noexcept:
        # Return whether both have an owner, and it is the same thread and loop; False for two affinities without an
        # owner.
        return self._thread != NULL and self._thread == other._thread and self.loop is other.loop

    cdef str _wrong_caller_text(self, object what, str verb):
        # Return the message of the AffinityError: owner, actual caller, and what to do.
        cdef affinity_thread *thread = affinity_thread_self()
        loop = _running_loop()
        caller = f"thread {threading.current_thread().name!r}"
        if thread == self._thread:
            caller = "its own thread"
        caller += f" with {_name_of_loop(loop)} running" if loop is not None else " with no event loop running"
        if affinity_thread_ended(<affinity_thread *>self._thread):
            why = "the thread that owns this object has ended"
        elif self.loop.is_closed():
            why = "the loop that owns this object is closed"
        else:
            why = "call it on the owning loop; `await domain.run(function)` runs a function there"
        return f"{verb} on {what!r}, which belongs to {self._owner()}, was called from {caller}: {why}"

    cdef str _overlap_text(self, object what, str verb):
        # Return the message of the ConcurrentAccessError: refused verb, verb in flight, and what to do. If there is
        # an owner, its thread is itself inside of the verb in flight.
        refused = (
            f"{verb} on {what!r} was refused: its domain allows one call at a time, and another call "
            f"({<object>self._verb}) is still running"
        )
        if self._thread:
            return (
                f"{refused} in the same thread: this call was made from inside that one, for example by an allocator; "
                "call again after it has returned"
            )
        return f"{refused}, in another thread or around this call: call again after it has returned"

    cdef str _owner(self):
        # Return text that names the thread and the loop of the owner; only for a bound affinity.
        return f"thread {self.thread_name!r} with {_name_of_loop(self.loop)}"

    def __repr__(self):
        return f"<Affinity of {self._owner()}>" if self._thread else "<Affinity of no thread>"


cdef inline bint _is_unchanged_owner(void *thread, int inside, uint64_t version) noexcept:
    # The fast path of `_enter`: nothing has changed since it last succeeded, and no verb is in flight.
    return version and not inside and affinity_thread_self() == thread and running_loop_version() == version


if affinity_thread_prepare() or running_loop_prepare():
    raise MemoryError("a key for threads, or a string")
