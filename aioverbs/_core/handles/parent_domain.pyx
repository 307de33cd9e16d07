# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Handles of thread domains and of parent domains with their allocators. XRC domains are also exported here."""

import threading

from aioverbs._core.alloc.allocators import USE_DEFAULT
from aioverbs._core.handles.handles import XrcDomain  # no-cython-lint
from aioverbs.errors import VerbsError

from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from libc.errno cimport EINVAL, ENOMEM, errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcmp, memset

from aioverbs._core.alloc.allocators cimport NativeAllocator, alloc_free_function, alloc_function
from aioverbs._core.handles.handles cimport Affinity, Context, Handle, ProtectionDomain
cimport aioverbs._core.abi.libibverbs as v

cdef extern from "handles/pd_allocator.h" nogil:
    struct domain_memory:
        alloc_function alloc
        alloc_free_function free
        void *self

    void *domain_memory_alloc(v.ibv_pd *, void *, size_t, size_t, uint64_t) noexcept
    void domain_memory_free(v.ibv_pd *, void *, void *, uint64_t) noexcept
    bint domain_memory_take_failure(const domain_memory *)
    size_t domain_memory_held(const domain_memory *)


cdef class ThreadDomain(Handle):
    """Thread domain (``ibv_alloc_td``). Objects created in it take no locks, so that only one thread at a time may use
    any of them.

    :param context: the device.
    :param affinity: owner of the domain; None if any thread may use it.
    :raises ClosedResourceError: the context is closed.
    :raises AffinityError: the caller is not the owner of the new domain.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner.
    :raises VerbsError: the verb, which the constructor calls, failed; with EOPNOTSUPP if the provider has no thread
        domains.
    """

    cdef v.ibv_td *pointer

    def __init__(self, Context context not None, *, Affinity affinity=None):
        self._begin()
        self._enter_owner(affinity, "ibv_alloc_td")
        try:
            self._create(context)
        finally:
            self._leave_owner()

    cdef int _create(self, Context context) except -1:
        cdef v.ibv_td_init_attr attr
        cdef int error = 0
        memset(&attr, 0, sizeof(attr))
        context._enter()
        self.context = context
        try:
            with nogil:
                self.pointer = v.verbs_alloc_td(context.pointer, &attr)
                error = errno
            if not self.pointer:
                raise VerbsError("ibv_alloc_td", error)
            self._opened("")
        except BaseException:
            if self.pointer:
                self._destroy_verb()
            context._leave()
            raise
        return 0

    cdef str _destroy_name(self):
        return "ibv_dealloc_td"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = v.verbs_dealloc_td(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        self.context._leave()


cdef class ParentDomain(ProtectionDomain):
    """Parent domain (``ibv_alloc_parent_domain``), which can be used wherever a protection domain is needed.

    The allocator provides memory for the queues and doorbell records of the provider:

    - ``allocate(size, alignment, resource_type, pd, pd_context)``, with size and alignment in bytes, returns the
      address of zeroed, aligned memory that a fork does not copy; or `USE_DEFAULT`, so that the provider uses its own
      memory; or None if it has no memory, so that the verb fails with ENOMEM.
    - ``free(address, resource_type, pd, pd_context)`` takes the memory back. It is called once for each allocation,
      with the same `resource_type`.

    `pd` is this domain. `resource_type` has the provider's number in its upper 32 bits, and the provider's code for a
    queue pair, a completion queue, a record and so on in its lower 32 bits. An exception that ``allocate`` raises
    becomes the cause of the verb's error; but if it is not an `Exception`, such as `KeyboardInterrupt`, it propagates
    unchanged. An exception that ``free`` raises is passed to `sys.unraisablehook`. The allocator is called in the
    thread that calls the verb, and may itself call verbs. A `NativeAllocator` is called in C, without the GIL.

    :param pd: the protection domain; if it is a parent domain, only its base is used.
    :param td: thread domain of all objects that are created in the parent domain; None if there is none.
    :param allocator: the allocator; None for the provider's own memory.
    :param pd_context: any object, which is passed to the allocator.
    :param affinity: owner of the domain; None for the owner of `td`, if that has one. Only the owner may use the
        domain; if there is none, any thread may use it.
    :raises ValueError: `td` belongs to another context, or its owner is not `affinity`.
    :raises ClosedResourceError: `pd` or `td` is closed.
    :raises AffinityError: the caller is not the owner of the new domain.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner.
    :raises VerbsError: the verb, which the constructor calls, failed; with EOPNOTSUPP if the provider has no parent
        domains, or does not support allocators or thread domains.
    """

    cdef readonly ProtectionDomain base
    cdef readonly ThreadDomain td
    cdef readonly object allocator
    cdef readonly object pd_context
    cdef dict _causes                   # thread ident -> exception, from the callback to the verb around it
    cdef dict _sizes                    # address -> size in bytes of memory that the provider holds
    cdef domain_memory _native          # for an allocator in C, used instead of these two

    def __init__(
        self,
        ProtectionDomain pd not None,
        ThreadDomain td=None,
        allocator=None,
        pd_context=None,
        *,
        Affinity affinity=None,
    ):
        self._begin()
        if isinstance(pd, ParentDomain):  # ibv_alloc_parent_domain accepts one as well
            pd = (<ParentDomain>pd).base
        if td is not None and td.context is not pd.context:
            raise ValueError(f"{td!r} belongs to a different context than {pd!r}")
        if td is not None and td.affinity is not affinity:
            if affinity is not None:
                raise ValueError(f"{td!r} belongs to {td.affinity!r}, not to {affinity!r}")
            affinity = td.affinity
        self._enter_owner(affinity, "ibv_alloc_parent_domain")
        try:
            self._create(pd, td, allocator, pd_context)
        finally:
            self._leave_owner()

    cdef int _create(self, ProtectionDomain pd, ThreadDomain td, allocator, pd_context) except -1:
        cdef v.ibv_parent_domain_init_attr attr
        cdef int error = 0
        memset(&attr, 0, sizeof(attr))
        self._causes = {}
        self._sizes = {}
        self.allocator = allocator
        self.pd_context = pd_context
        self.context = pd.context
        self.base = pd
        self.td = td
        pd._enter()
        try:
            if td is not None:
                td._enter()
            try:
                attr.pd = pd.pointer
                attr.td = td.pointer if td is not None else NULL
                if allocator is not None:
                    attr.comp_mask = (
                        v.IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | v.IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
                    )
                    self._set_callbacks(&attr)
                with nogil:
                    self.pointer = v.verbs_alloc_parent_domain(pd.context.pointer, &attr)
                    error = errno
                if not self.pointer:
                    raise self._verb_error("ibv_alloc_parent_domain", error, self._take_cause())
                self._lender_slot = pd._lender_slot   # a lender that closes the base also ends this domain
                self._lent_pointer = pd._lent_pointer
                self._opened(f"{self.pointer.handle}")
            except BaseException:
                if self.pointer:
                    self._destroy_verb()
                if td is not None:
                    td._leave()
                raise
        except BaseException:
            pd._leave()
            raise
        return 0

    # The ledger keeps the domain alive, and the domain its allocator, until the provider has freed all memory.
    cdef int _set_callbacks(self, v.ibv_parent_domain_init_attr *attr) except -1:
        # Have the provider call the allocator: in C if the allocator works in C, otherwise through the callbacks below.
        cdef NativeAllocator native
        if isinstance(self.allocator, NativeAllocator) and (<NativeAllocator>self.allocator).alloc:
            native = self.allocator
            self._native.alloc = native.alloc
            self._native.free = native.free_piece
            self._native.self = native.source
            attr.alloc = domain_memory_alloc
            attr.free = domain_memory_free
            attr.pd_context = &self._native
        else:
            attr.alloc = _allocate
            attr.free = _free
            attr.pd_context = <void *>self
        return 0

    cdef int _destroy_verb(self) except? -1:
        cdef int error
        with nogil:
            error = self.context.table.dealloc_pd(self.pointer)
        return error

    cdef void _leave_parents(self) noexcept:
        if self.td is not None:
            self.td._leave()
        self.base._leave()

    cdef object _take_cause(self):
        # Return and clear the exception that the allocator raised during the verb that just failed in this thread; None
        # if there is none.
        if domain_memory_take_failure(&self._native):
            return (<NativeAllocator>self.allocator)._failure()
        return self._causes.pop(threading.get_ident(), None)

    @property
    def held(self):
        """Number of pieces of memory that the provider has taken from the allocator and not freed; 0 if there is no
        allocator. Never fails."""
        return len(self._sizes) + domain_memory_held(&self._native)

    def _allocate(self, size, alignment, resource_type):
        """Allocate memory from the allocator written in Python, and check the result.

        Exceptions that the allocator raises propagate unchanged.

        :param size: size in bytes.
        :param alignment: alignment in bytes.
        :param resource_type: resource type, as described for `ParentDomain`.
        :returns: an address, `USE_DEFAULT` or None, as the allocator returned it.
        :raises TypeError: the allocator returned anything else.
        :raises ValueError: the address is in use; or it is not aligned, or the memory there is not zeroed, and the
            allocator has taken that memory back.
        """
        address = self.allocator.allocate(size, alignment, resource_type, self, self.pd_context)
        if address is USE_DEFAULT or address is None:
            return address
        if not isinstance(address, int) or isinstance(address, bool) or not 0 < address < 1 << 64:
            raise TypeError(f"allocate() must return an address, USE_DEFAULT or None, not {address!r}")
        if address in self._sizes:
            raise ValueError(f"allocate() returned {address:#x}, which is in use")
        problem = _unfit(address, size, alignment)
        if problem:
            self.allocator.free(address, resource_type, self, self.pd_context)
            raise ValueError(f"allocate() returned {address:#x}, which is not {problem}")
        self._sizes[address] = size
        return address

    def _free(self, address, resource_type):
        """Call ``free`` of the allocator written in Python for a piece that the provider no longer uses.

        Exceptions that the allocator raises propagate unchanged; the piece counts as freed.

        :param address: address of the piece.
        :param resource_type: resource type with which the piece was allocated.
        :raises KeyError: the provider holds no piece at `address`; the allocator is not called.
        """
        del self._sizes[address]
        self.allocator.free(address, resource_type, self, self.pd_context)


def _unfit(address, size_t size, uint64_t alignment):
    """Return what the memory at `address` should be but is not, as a string such as "zeroed"; None if the memory is
    aligned and zeroed."""
    cdef const char *memory = <const char *><uintptr_t>address
    if alignment and address % alignment:
        return f"aligned to {alignment} bytes"
    if size and (memory[0] or memcmp(memory, memory + 1, size - 1)):
        return "zeroed"
    return None


# Callbacks of the provider, which verbs call in the thread that called the verb and released the GIL. `_allocate`
# returns an address, IBV_ALLOCATOR_USE_DEFAULT, or NULL with errno set.

cdef extern from *:
    """
    #include <errno.h>
    static inline void aioverbs_set_errno(int error)
    {
        errno = error;
    }
    """
    void aioverbs_set_errno(int error) nogil


cdef void *_allocate(
    v.ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t resource_type
) noexcept nogil:
    cdef int error = 0
    cdef void *address = _allocate_with_gil(pd_context, size, alignment, resource_type, &error)
    if error:
        aioverbs_set_errno(error)       # last: releasing the GIL may change errno
    return address


cdef void *_allocate_with_gil(
    void *pd_context, size_t size, size_t alignment, uint64_t resource_type, int *error
) noexcept with gil:
    # Return the same as `_allocate`, and set `error` to an errno on failure. An exception is kept for the verb's
    # caller.
    domain = <ParentDomain>pd_context
    try:
        address = domain._allocate(size, alignment, resource_type)
    except BaseException as cause:
        domain._causes[threading.get_ident()] = cause
        error[0] = EINVAL if isinstance(cause, (TypeError, ValueError)) else ENOMEM
        return NULL
    if address is USE_DEFAULT:
        return v.IBV_ALLOCATOR_USE_DEFAULT
    if address is None:
        error[0] = ENOMEM
        return NULL
    return <void *><uintptr_t>address


cdef void _free(v.ibv_pd *pd, void *pd_context, void *address, uint64_t resource_type) noexcept with gil:
    domain = <ParentDomain>pd_context
    try:
        domain._free(<uintptr_t>address, resource_type)
    except BaseException as error:
        # The verb around this call can no longer fail, and no caller waits for the error: report it to
        # sys.unraisablehook.
        PyErr_SetObject(type(error), error)
        PyErr_WriteUnraisable(domain)
