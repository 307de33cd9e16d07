# Part of allocators.pyx: error messages for failed allocations, which say what to do.

def _format_bytes(size):
    """Return a size in bytes as text, in the largest unit that divides it, such as "2 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"


def _huge_page_sizes():
    """Return the sizes in bytes of the huge pages that this kernel has, an ascending list; empty if it has none."""
    names = glob.glob("/sys/kernel/mm/hugepages/hugepages-*kB")
    return sorted(int(name.rpartition("-")[2].removesuffix("kB")) << 10 for name in names)


def _default_huge_page_size():
    """Return the size in bytes of the huge pages that /proc/sys/vm/nr_hugepages counts (2 MiB on x86); 0 if unknown."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("Hugepagesize:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass  # missing in a sandbox
    return 0


def _huge_pages_error_text(error, size, page_size):
    """Return the error message for `size` bytes of huge pages that could not be mapped, with errno `error`. The message
    says what to do.

    :param page_size: size of a huge page in bytes.
    """
    if error == EINVAL:
        sizes = ", ".join(map(_format_bytes, _huge_page_sizes())) or "none"
        return f"this kernel has no huge pages of {_format_bytes(page_size)}; it has: {sizes}"
    count = size // page_size
    where = f"/sys/kernel/mm/hugepages/hugepages-{page_size >> 10}kB/nr_hugepages"
    if page_size == _default_huge_page_size():
        where = "/proc/sys/vm/nr_hugepages"
    of_boot = f"{page_size >> 20}M" if page_size >= 1 << 20 else f"{page_size >> 10}K"
    return (
        f"{count} huge page{'s' if count > 1 else ''} of {_format_bytes(page_size)} cannot be allocated: "
        f"root configures them with `echo NUMBER > {where}`, "
        f"or at boot with `hugepagesz={of_boot} hugepages=NUMBER`"
    )


def _bind_error_text(error, node):
    """Return the error message for memory that could not be bound to NUMA node number `node`, with errno `error`."""
    if error in (ENOSYS, EOPNOTSUPP):
        return "this kernel cannot bind memory to a NUMA node"
    if error == EPERM:
        return "this process may not bind memory to a NUMA node: a sandbox forbids mbind()"
    return f"memory cannot be bound to NUMA node {node}: /sys/devices/system/node/online lists the available nodes"


cdef object _take_failure():
    # Return this thread's last failure, a MemoryError or OSError to raise, and clear it; None if there is none.
    cdef alloc_failure failure = alloc_last_failure()[0]
    if failure.step == ALLOC_NOTHING:
        return None
    alloc_clear_failure()
    if failure.step == ALLOC_BOOKKEEPING:
        return MemoryError("no memory for the bookkeeping of an allocator")
    if failure.step == ALLOC_MAP_HUGE:
        text = _huge_pages_error_text(failure.error, failure.size, failure.page_bytes)
    elif failure.step == ALLOC_BIND:
        text = _bind_error_text(failure.error, failure.node)
    elif failure.step == ALLOC_DONT_FORK:
        text = "pages cannot be kept from the children of forks: madvise(MADV_DONTFORK) failed"
    elif failure.step == ALLOC_AREA:
        text = f"the memory of the protection domain has no {failure.size} contiguous free bytes"
        if failure.error == ENODEV:
            text = "the memory of the protection domain is the parent's: import the domain in this process"
        elif failure.error == ENXIO:
            text = "the protection domain of this memory is closed"
    elif failure.step == ALLOC_MAP:
        text = f"{failure.size} bytes of shared memory cannot be mapped: {os.strerror(failure.error)}"
    else:
        text = f"no memory can have this size or alignment: {failure.size} bytes"
    return OSError(failure.error, text)


cdef int _raise_failure() except -1:
    # Raise this thread's last failure; raise MemoryError if none is recorded.
    raise _take_failure() or MemoryError()
