# Part of handles.pyx: what all posting has in common.

cdef v.ibv_sge *_make_sges(sges, int *entries, uint64_t *total) except? NULL:
    cdef Py_ssize_t count = len(sges), i
    cdef v.ibv_sge *result
    if count > MAX_SGE:
        raise ValueError(f"a work request has {MAX_SGE} scatter/gather entries at most, not {count}")
    entries[0] = count
    if not count:
        return NULL
    result = <v.ibv_sge *>PyMem_Malloc(count * sizeof(v.ibv_sge))
    if not result:
        raise MemoryError
    try:
        for i in range(count):
            address, length, lkey = sges[i]
            result[i].addr = PyNumber_Index(address)     # a float would be cut off
            result[i].length = PyNumber_Index(length)
            result[i].lkey = PyNumber_Index(lkey)
            total[0] += result[i].length
    except BaseException:
        PyMem_Free(result)
        raise
    return result
