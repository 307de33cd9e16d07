# Allocators that work in C: what providers are given, and what other extensions of the core need of them.

from libc.stdint cimport uint64_t

cdef extern from "alloc/alloc.h" nogil:
    ctypedef void *(*alloc_function)(void *, size_t, size_t, uint64_t) noexcept
    ctypedef void (*alloc_free_function)(void *, void *, uint64_t) noexcept


cdef class NativeAllocator:
    cdef void *source                   # struct alloc_source; for the two functions, where they are there
    cdef alloc_function alloc        # NULL: only Python's methods are to be called
    cdef alloc_free_function free_piece

    cdef int _begin(self, void *source) except -1
    cdef object _failure(self)          # why this thread's last call failed, an exception; None where it did not
