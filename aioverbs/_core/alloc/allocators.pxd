# Allocators that work in C, for providers and for other extensions of the core.

from libc.stdint cimport uint64_t

cdef extern from "alloc/alloc.h" nogil:
    ctypedef void *(*alloc_function)(void *, size_t, size_t, uint64_t) noexcept
    ctypedef void (*alloc_free_function)(void *, void *, uint64_t) noexcept


cdef class NativeAllocator:
    cdef void *source                   # struct alloc_source, the first argument of the two functions
    cdef alloc_function alloc        # NULL: call the Python methods instead
    cdef alloc_free_function free_piece

    cdef int _begin(self, void *source) except -1
    cdef object _failure(self)          # this thread's last failure, an exception; None if there is none
