# Part of software.pyx: the software device's peers in other processes.


cdef int _fill_address(s.soft_address *out, address) except -1:
    """Fill a struct soft_address.

    :param address: a tuple of an IP address, as bytes, and a port; None to fill the struct with zeros.
    :raises ValueError: the IP address is not 4 or 16 bytes long.
    :raises OverflowError: the port is out of range.
    """
    cdef bytes host
    memset(out, 0, sizeof(out[0]))
    if address is not None:
        host, out.port = address
        if len(host) not in (4, 16):
            raise ValueError(f"an IP address must have 4 or 16 bytes, got {len(host)}")
        out.family = socket.AF_INET if len(host) == 4 else socket.AF_INET6
        memcpy(out.bytes, <const char *>host, len(host))
    return 0


cdef int _fill_settings(s.soft_settings *out, settings) except -1:
    """Fill a struct soft_settings from a `SoftSettings`.

    :raises ValueError: the directory's path, the users or the secret exceed the limits of the device, which cannot
        happen if the settings were read from the environment.
    """
    cdef bytes directory = settings.directory, secret = settings.secret
    if len(directory) >= s.SOFT_MAX_PATH or len(settings.users) > s.SOFT_MAX_USERS or len(secret) > s.SOFT_MAX_SECRET:
        raise ValueError("the directory's path, the users or the secret exceed the limits of the software device")
    memset(out, 0, sizeof(out[0]))
    memcpy(out.directory, <const char *>directory, len(directory))
    for number, user in enumerate(settings.users):
        out.users[number] = user
    out.user_count = len(settings.users)
    memcpy(out.secret, <const char *>secret, len(secret))
    out.secret_size = len(secret)
    out.direct = settings.direct
    out.rings = settings.rings
    out.spin_ns = 1000 * settings.spin_us
    return 0


cdef str _text(const char *text):
    # Return a C string as str, with undecodable bytes replaced.
    return text.decode(errors="replace")


cdef object _gid(const uint8_t *raw):
    """Return the GID at `raw` as 16 bytes; None if it is zero, which means that there is no GID."""
    cdef bytes gid = (<const char *>raw)[:16]
    return gid if any(gid) else None


cdef object _peer(s.soft_stream_stats *stream):
    # Return a new `Peer` with the statistics of a stream, the connection with another process.
    cdef bint known = stream.connected_times or not stream.is_link, of_host = known and stream.is_unix
    return Peer(
        gids=tuple(gid for gid in (_gid(stream.peer[0]), _gid(stream.peer[1])) if gid is not None),
        connected_by_us=stream.is_link,
        connected=stream.connected,
        transport=("unix" if stream.is_unix else "tcp") if known else None,
        direct=stream.direct,
        why_not_direct=_text(stream.why_not_direct),
        rings=stream.rings,
        why_not_rings=_text(stream.why_not_rings),
        problem=_text(stream.reason),
        process_id=stream.pid if of_host else None,
        user_id=stream.uid if of_host else None,
        frames_in=stream.frames_in,
        frames_out=stream.frames_out,
        bytes_in=stream.bytes_in,
        bytes_out=stream.bytes_out,
        connections=stream.connected_times,
        waiting_queue_pairs=stream.waiting,
    )


cdef tuple _peers(Context context):
    """Return a tuple with a new `Peer` for each stream, the connections with other processes.

    A peer that connects while the streams are being counted may be missing.

    :raises MemoryError: there is not enough memory for a copy of the statistics.
    """
    cdef s.soft_stream_stats *streams
    cdef size_t count, capacity
    with nogil:
        capacity = s.soft_get_stream_stats(context.pointer, NULL, 0)
    if not capacity:
        return ()
    streams = <s.soft_stream_stats *>PyMem_Malloc(capacity * sizeof(streams[0]))
    if not streams:
        raise MemoryError
    try:
        with nogil:
            count = s.soft_get_stream_stats(context.pointer, streams, capacity)
        return tuple([_peer(&streams[index]) for index in range(min(count, capacity))])
    finally:
        PyMem_Free(streams)


cdef object _rejected_peer(s.soft_fabric_event *event):
    # Return a new `RejectedPeer`, with its time in UTC.
    seconds, nanoseconds = divmod(event.time_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC).replace(microsecond=nanoseconds // 1000)
    return RejectedPeer(moment, _gid(event.peer), _text(event.reason))


cdef object _fabric(Context context):
    # Return new `FabricStatistics`; the caller has entered the context.
    cdef s.soft_fabric_stats stats
    with nogil:
        s.soft_get_fabric_stats(context.pointer, &stats)
    return FabricStatistics(
        listening=stats.listening,
        path=stats.path.decode(errors="surrogateescape"),
        address=_text(stats.address),
        problem=context._unreachable_reason(),
        accepted=stats.accepted,
        connected=stats.connected,
        failed_connections=stats.failed_connects,
        lost=stats.lost,
        refused_peers=stats.refused_peers,
        refused_frames=stats.refused_frames,
        refusals=tuple([_rejected_peer(&stats.event[index]) for index in range(stats.events)]),
        peers=_peers(context),
    )


def give_back_pages(QueuePair qp not None, uintptr_t address, size_t length):
    """Give pages back to the kernel that an idle queue pair does not need: those of the receives that are posted, whose
    contents are lost, and of the rings to its peer, with those of other memory. The kernel provides new pages when they
    are used again. Do nothing on RDMA devices, which pin memory.

    :param qp: the queue pair.
    :param address: address of memory that nothing uses.
    :param length: its length in bytes, possibly 0; a page at either end that it does not fill is kept.
    :raises AffinityError: the caller is not on the thread and event loop that own the queue pair.
    :raises BusyResourceError: another thread is changing the state of the queue pair.
    :raises ClosedResourceError: the queue pair is destroyed.
    :raises ConcurrentAccessError: another thread is executing a verb on the same unlocked domain.
    """
    qp._use("soft_give_back")
    try:
        if qp.context.software:
            with nogil:
                s.soft_give_back(qp.pointer, <void *>address, length)
    finally:
        qp._unuse()
