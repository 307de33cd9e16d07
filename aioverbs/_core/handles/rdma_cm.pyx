# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Handles of librdmacm: event channels and identifiers.

No call waits for a peer: the result of a request arrives as an event. An event is copied and acknowledged when it is
taken, so that no event keeps an identifier from being destroyed. librdmacm does not create the queue pairs: callers
pass queue pair numbers to it and ask it for queue pair attributes.
"""

import os
import socket

from aioverbs._core.handles.library_lock import library_lock
from aioverbs.errors import LibraryNotFoundError, VerbsError
from aioverbs.types import AccessFlags, Mtu

from libc.errno cimport EAGAIN, EINVAL, ENODEV, ENOENT, ENOSYS, EOPNOTSUPP, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memset

cimport aioverbs._core.abi.libibverbs as v
from aioverbs._core.handles.handles cimport AddressHandle, Affinity, Handle

cdef extern from "<netinet/in.h>" nogil:
    enum:
        AF_INET
        AF_INET6
    uint16_t htons(uint16_t)
    uint16_t ntohs(uint16_t)
    struct in_addr:
        pass
    struct in6_addr:
        pass
    struct sockaddr:
        unsigned short sa_family
    struct sockaddr_in:
        unsigned short sin_family
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        unsigned short sin6_family
        uint16_t sin6_port
        uint32_t sin6_flowinfo
        in6_addr sin6_addr
        uint32_t sin6_scope_id
    struct sockaddr_storage:
        pass

cdef extern from "abi/cm_ops.h" nogil:
    enum rdma_cm_event_type:
        RDMA_CM_EVENT_CONNECT_REQUEST
    enum rdma_port_space:
        RDMA_PS_TCP
    struct rdma_addr:
        sockaddr src_addr
        sockaddr dst_addr
    struct rdma_route:
        rdma_addr addr
    struct rdma_event_channel:
        int fd
    struct rdma_cm_id:
        v.ibv_context *verbs
        rdma_route route
        uint8_t port_num
    struct rdma_conn_param:
        const void *private_data
        uint8_t private_data_len
        uint8_t responder_resources
        uint8_t initiator_depth
        uint8_t retry_count
        uint8_t rnr_retry_count
        uint8_t srq
        uint32_t qp_num
    union _rdma_event_param:                # anonymous in C, reached only through the event
        rdma_conn_param conn
    struct rdma_cm_event:
        rdma_cm_id *id
        rdma_cm_id *listen_id
        rdma_cm_event_type event
        int status
        _rdma_event_param param
    struct rdma_cm_table:
        rdma_event_channel *(*create_event_channel)() noexcept nogil
        void (*destroy_event_channel)(rdma_event_channel *) noexcept nogil
        int (*get_cm_event)(rdma_event_channel *, rdma_cm_event **) noexcept nogil
        int (*ack_cm_event)(rdma_cm_event *) noexcept nogil
        int (*create_id)(rdma_event_channel *, rdma_cm_id **, void *, rdma_port_space) noexcept nogil
        int (*destroy_id)(rdma_cm_id *) noexcept nogil
        int (*bind_addr)(rdma_cm_id *, sockaddr *) noexcept nogil
        int (*listen)(rdma_cm_id *, int) noexcept nogil
        int (*resolve_addr)(rdma_cm_id *, sockaddr *, sockaddr *, int) noexcept nogil
        int (*resolve_route)(rdma_cm_id *, int) noexcept nogil
        int (*init_qp_attr)(rdma_cm_id *, v.ibv_qp_attr *, int *) noexcept nogil
        int (*connect)(rdma_cm_id *, rdma_conn_param *) noexcept nogil
        int (*establish)(rdma_cm_id *) noexcept nogil
        int (*accept)(rdma_cm_id *, rdma_conn_param *) noexcept nogil
        int (*reject)(rdma_cm_id *, const void *, uint8_t) noexcept nogil
        int (*disconnect)(rdma_cm_id *) noexcept nogil
    const char *rdma_cm_table_load(rdma_cm_table *, const char *)
    bint rdma_cm_moves_queue_pairs(const rdma_cm_id *)

cdef dict _ADVICE = {
    EINVAL: "the identifier's state does not allow this, or a value exceeds the device's limits",
    ENODEV: "no RDMA device has that address or a path to it: see `rdma link`, and use no loopback address",
}
cdef str _NO_MANAGER = "the connection manager is not available to this process: run `modprobe rdma_ucm`, and check "\
    "the permissions of /dev/infiniband/rdma_cm"
cdef dict _NO_CHANNEL = {
    ENODEV: "libibverbs lists no RDMA device, for which its providers may be missing, or " + _NO_MANAGER +
            "; `aioverbs doctor` finds out",
    ENOENT: _NO_MANAGER,
}

cdef rdma_cm_table _table
cdef bint _is_loaded = False


def load_librdmacm(library="librdmacm.so.1"):
    """Check that librdmacm can be loaded and has every function that is needed. Return None and change nothing.

    :param library: name of the shared library.
    :raises LibraryNotFoundError: the library cannot be loaded, or lacks a function.
    """
    cdef rdma_cm_table table
    _load(&table, library)


cdef int _load(rdma_cm_table *table, library) except -1:
    # Fill the table from the shared library. Raise LibraryNotFoundError if that fails.
    cdef bytes name = library.encode()
    cdef const char *problem = rdma_cm_table_load(table, name)
    cdef int error = errno
    if problem:
        raise LibraryNotFoundError(library, problem.decode(errors="replace"), outdated=error == ENOSYS)
    return 0


cdef int _load_once() except -1:
    # Fill `_table` on the first call. Raise LibraryNotFoundError if librdmacm cannot be loaded; the next call then
    # tries again.
    global _is_loaded
    with library_lock:
        if not _is_loaded:
            _load(&_table, "librdmacm.so.1")
            _is_loaded = True
    return 0


cdef class Event:
    """Event of an identifier: ``struct rdma_cm_event``, copied and acknowledged. `EventChannel.take_event` makes it.

    `event_type` (``enum rdma_cm_event_type``) and `status` (0, a negative errno, or a reason of the peer or transport)
    are numbers. `identifier` is the event's identifier, or None if it was destroyed. `listener` is the listening
    identifier of a connection request, otherwise None. `private_data` is the data that the peer sent, bytes; empty if
    there is none.
    """

    cdef readonly int event_type
    cdef readonly int status
    cdef readonly Identifier identifier
    cdef readonly Identifier listener
    cdef readonly bytes private_data

    def __init__(self):
        raise TypeError("events come from EventChannel.take_event")


cdef class EventChannel(Handle):
    """Event channel (``rdma_create_event_channel``). Its file descriptor is non-blocking.

    :param affinity: owner of the channel; None if any thread may use it.
    :raises LibraryNotFoundError: librdmacm cannot be loaded.
    :raises AffinityError: the caller is not the owner of the new channel.
    :raises ConcurrentAccessError: another verb is in flight on an object of that owner.
    :raises VerbsError: the function failed; with ENODEV or ENOENT if the kernel module is not loaded; with EACCES if
        this process may not open the device file of the connection manager.
    """

    cdef rdma_event_channel *pointer
    cdef readonly int fd                # readable while an event waits
    cdef dict _identifiers              # address -> Identifier

    def __init__(self, Affinity affinity=None):
        self._begin()
        _load_once()
        self._identifiers = {}
        self._enter_owner(affinity, "rdma_create_event_channel")
        try:
            self._create()
        finally:
            self._leave_owner()

    cdef int _create(self) except -1:
        cdef int error
        with library_lock, nogil:
            self.pointer = _table.create_event_channel()
            error = errno
        if not self.pointer:
            raise VerbsError("rdma_create_event_channel", error, _NO_CHANNEL.get(error))
        try:
            self.fd = self.pointer.fd
            os.set_blocking(self.fd, False)
            self._opened(f"{self.fd}")
        except BaseException:
            self._destroy_verb()
            raise
        return 0

    cdef str _destroy_name(self):
        return "rdma_destroy_event_channel"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        with nogil:
            _table.destroy_event_channel(self.pointer)
        return 0

    def take_event(self):
        """Take the next event and acknowledge it, without waiting (``rdma_get_cm_event``, ``rdma_ack_cm_event``).

        The identifier in the event of a connection request is new; the caller destroys it.

        :returns: the `Event`; None if no event is waiting.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the channel is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        :raises VerbsError: ``rdma_get_cm_event`` failed.
        """
        cdef rdma_cm_event *event = NULL
        cdef rdma_cm_id *unclaimed
        cdef Event taken = None
        cdef int failed, error
        self._use("rdma_get_cm_event")
        try:
            with library_lock, nogil:
                failed = _table.get_cm_event(self.pointer, &event)
                error = errno
            if failed:
                if error == EAGAIN:
                    return None
                raise VerbsError("rdma_get_cm_event", error)
            try:
                taken = self._read(event)
            finally:
                unclaimed = event.id if event.event == RDMA_CM_EVENT_CONNECT_REQUEST and taken is None else NULL
                with nogil:
                    _table.ack_cm_event(event)
                if unclaimed:
                    with library_lock, nogil:
                        _table.destroy_id(unclaimed)
            return taken
        finally:
            self._unuse()

    cdef Event _read(self, rdma_cm_event *event):
        # Return a copy of the event. If this raises, the new identifier of a connection request stays unclaimed.
        cdef Event taken = Event.__new__(Event)
        cdef rdma_conn_param *conn = &event.param.conn
        taken.event_type = <int>event.event
        taken.status = event.status
        taken.private_data = (<const char *>conn.private_data)[:conn.private_data_len]
        if event.event == RDMA_CM_EVENT_CONNECT_REQUEST:
            taken.listener = self._identifiers.get(<uintptr_t>event.listen_id)
            taken.identifier = Identifier.__new__(Identifier)
            taken.identifier._attach(self, event.id)    # last: a failure before leaves the identifier unclaimed
        else:
            taken.identifier = self._identifiers.get(<uintptr_t>event.id)
        return taken


cdef class Identifier(Handle):
    """Identifier (``rdma_create_id``) of a connection or a listener, for connected queue pairs (RDMA_PS_TCP).

    Addresses have the same form as those of sockets: ``(host, port)``, or four values for IPv6. Results of requests
    arrive as events. Each method returns None unless its description says otherwise; it raises `VerbsError` if its
    function fails, `AffinityError` if the caller is not the channel's owner, and OSError if an address is not an IP
    address.

    :param channel: event channel of the identifier.
    :raises ClosedResourceError: the channel is destroyed.
    :raises AffinityError: the caller is not the channel's owner.
    :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
    :raises VerbsError: ``rdma_create_id`` failed.
    """

    cdef rdma_cm_id *pointer
    cdef readonly EventChannel channel

    def __init__(self, EventChannel channel not None):
        cdef int failed, error
        cdef rdma_cm_id *pointer = NULL
        self._begin()
        self._enter_owner(channel.affinity, "rdma_create_id")
        try:
            channel._enter()
            try:
                with library_lock, nogil:
                    failed = _table.create_id(channel.pointer, &pointer, NULL, RDMA_PS_TCP)
                    error = errno
                _check(failed, error, "rdma_create_id")
            finally:
                channel._leave()
            try:
                self._attach(channel, pointer)
            except BaseException:
                with library_lock, nogil:
                    _table.destroy_id(pointer)
                raise
        finally:
            self._leave_owner()

    cdef int _attach(self, EventChannel channel, rdma_cm_id *pointer) except -1:
        # Make this the open handle of the identifier at `pointer`. If this raises, the caller must destroy the
        # identifier.
        self.affinity = channel.affinity
        channel._enter()
        try:
            channel._identifiers[<uintptr_t>pointer] = self
            self.pointer = pointer
            self.channel = channel
            self._opened("")
        except BaseException:
            channel._identifiers.pop(<uintptr_t>pointer, None)
            channel._leave()
            raise
        return 0

    cdef str _destroy_name(self):
        return "rdma_destroy_id"

    cdef void *_verbs_object(self) except NULL:
        return self.pointer

    cdef int _destroy_verb(self) except? -1:
        # After the verb another identifier may get the same address.
        cdef int failed, error
        self.channel._identifiers.pop(<uintptr_t>self.pointer, None)
        with library_lock, nogil:
            failed = _table.destroy_id(self.pointer)
            error = errno
        if failed:
            self.channel._identifiers[<uintptr_t>self.pointer] = self
        return error if failed else 0

    cdef void _leave_parents(self) noexcept:
        self.channel._leave()

    cdef int _finish(self, int failed, int error, str verb) except -1:
        # End a verb that `_use` began, and raise VerbsError if it failed.
        self._unuse()
        return _check(failed, error, verb)

    # ---- Addresses

    @property
    def device_name(self):
        """Name of the RDMA device to which the identifier is bound; None if it is not bound.

        :raises ClosedResourceError: the identifier is destroyed.
        """
        self._enter()
        name = os.fsdecode(self.pointer.verbs.device.name) if self.pointer.verbs else None
        self._leave()
        return name

    @property
    def port_num(self):
        """Number of the port to which the identifier is bound, from 1; 0 if it is not bound.

        :raises ClosedResourceError: the identifier is destroyed.
        """
        self._enter()
        port_num = self.pointer.port_num
        self._leave()
        return port_num

    @property
    def local_address(self):
        """Local address of the identifier, ``(host, port)`` or four values for IPv6; None if the identifier is not
        bound, or has an InfiniBand address.

        :raises ClosedResourceError: the identifier is destroyed.
        """
        return self._address(False)

    @property
    def peer_address(self):
        """Address of the peer, in the form of `local_address`; None if there is no peer.

        :raises ClosedResourceError: the identifier is destroyed.
        """
        return self._address(True)

    cdef object _address(self, bint peer):
        # Return the peer's address or the local one; None if there is none.
        self._enter()
        try:
            return _read_address(
                &self.pointer.route.addr.dst_addr if peer else &self.pointer.route.addr.src_addr
            )
        finally:
            self._leave()

    def bind_addr(self, address):
        """Bind the identifier to a local address (``rdma_bind_addr``).

        :param address: address of this machine, or the wildcard address; in the form of `local_address`.
        :raises ValueError: `address` has neither two nor four values.
        :raises OSError: the host in `address` is not an IP address.
        :raises OverflowError: the port in `address` is not in 0..65535.
        :raises VerbsError: ``rdma_bind_addr`` failed.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef sockaddr_storage local
        cdef int failed, error
        _fill_address(&local, address)
        self._use("rdma_bind_addr")
        with library_lock, nogil:
            failed = _table.bind_addr(self.pointer, <sockaddr *>&local)
            error = errno
        self._finish(failed, error, "rdma_bind_addr")

    def listen(self, int backlog):
        """Listen for connection requests (``rdma_listen``).

        :param backlog: number of connection requests that may wait to be taken.
        :raises VerbsError: ``rdma_listen`` failed.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef int failed, error
        self._use("rdma_listen")
        with library_lock, nogil:
            failed = _table.listen(self.pointer, backlog)
            error = errno
        self._finish(failed, error, "rdma_listen")

    def resolve_addr(self, address, int timeout_ms, source=None):
        """Start looking for the device through which an address is reached, to bind to it (``rdma_resolve_addr``).

        The result arrives as an event, ADDR_RESOLVED or ADDR_ERROR.

        :param address: address of the peer, in the form of `local_address`.
        :param timeout_ms: time limit in milliseconds; afterwards, ADDR_ERROR arrives.
        :param source: local address to use, in the same form; None for any.
        :raises ValueError: `address` or `source` has neither two nor four values.
        :raises OSError: the host in `address` or `source` is not an IP address.
        :raises OverflowError: a port is not in 0..65535.
        :raises VerbsError: ``rdma_resolve_addr`` failed.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef sockaddr_storage remote
        cdef sockaddr_storage local
        cdef sockaddr *start = NULL
        cdef int failed, error
        _fill_address(&remote, address)
        if source is not None:
            _fill_address(&local, source)
            start = <sockaddr *>&local
        self._use("rdma_resolve_addr")
        with library_lock, nogil:
            failed = _table.resolve_addr(self.pointer, start, <sockaddr *>&remote, timeout_ms)
            error = errno
        self._finish(failed, error, "rdma_resolve_addr")

    def resolve_route(self, int timeout_ms):
        """Start looking for the path to the resolved address (``rdma_resolve_route``).

        The result arrives as an event, ROUTE_RESOLVED or ROUTE_ERROR. If the daemon ibacm is running, librdmacm asks it
        first and blocks until it answers.

        :param timeout_ms: time limit in milliseconds; afterwards, ROUTE_ERROR arrives.
        :raises VerbsError: ``rdma_resolve_route`` failed; with EINVAL if the address has not been resolved, with
            EOPNOTSUPP for an iWARP device.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef int failed, error
        self._use_bound("rdma_resolve_route")
        with nogil:
            failed = _table.resolve_route(self.pointer, timeout_ms)
            error = errno
        self._finish(failed, error, "rdma_resolve_route")

    # ---- Connections

    cdef int _use_bound(self, str verb) except -1:
        # Begin a verb as `_use` does; raise VerbsError if the identifier is not bound, or is bound to an iWARP device.
        # librdmacm dereferences the device without checking that there is one.
        self._use(verb)
        if not self.pointer.verbs:
            self._unuse()
            raise VerbsError(verb, EINVAL, "resolve an address first")
        if not rdma_cm_moves_queue_pairs(self.pointer):
            self._unuse()
            raise VerbsError(verb, EOPNOTSUPP, "queue pairs are connected over InfiniBand and RoCE here, not iWARP")
        return 0

    def init_qp_attr(self, int qp_state):
        """Return the attributes with which to move the connection's queue pair to a state (``rdma_init_qp_attr``).

        :param qp_state: number of the `QpState`.
        :returns: a dict of attributes for `QueuePair.modify`, by name, without ``qp_state``.
        :raises VerbsError: ``rdma_init_qp_attr`` failed; with EINVAL if no address was resolved, with EOPNOTSUPP for an
            iWARP device.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef v.ibv_qp_attr attr
        cdef int failed, error, mask = 0
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = <v.ibv_qp_state>qp_state
        self._use_bound("rdma_init_qp_attr")
        with nogil:
            failed = _table.init_qp_attr(self.pointer, &attr, &mask)
            error = errno
        self._finish(failed, error, "rdma_init_qp_attr")
        return {name: value for bit, name, value in (
            (v.IBV_QP_ACCESS_FLAGS, "qp_access_flags", AccessFlags(attr.qp_access_flags)),
            (v.IBV_QP_PKEY_INDEX, "pkey_index", attr.pkey_index),
            (v.IBV_QP_PORT, "port_num", attr.port_num),
            (v.IBV_QP_AV, "av", AddressHandle.read(&attr.ah_attr)),
            (v.IBV_QP_PATH_MTU, "path_mtu", Mtu(attr.path_mtu) if attr.path_mtu else None),
            (v.IBV_QP_TIMEOUT, "timeout", attr.timeout),
            (v.IBV_QP_RETRY_CNT, "retry_cnt", attr.retry_cnt),
            (v.IBV_QP_RNR_RETRY, "rnr_retry", attr.rnr_retry),
            (v.IBV_QP_RQ_PSN, "rq_psn", attr.rq_psn),
            (v.IBV_QP_MAX_QP_RD_ATOMIC, "max_rd_atomic", attr.max_rd_atomic),
            (v.IBV_QP_MIN_RNR_TIMER, "min_rnr_timer", attr.min_rnr_timer),
            (v.IBV_QP_SQ_PSN, "sq_psn", attr.sq_psn),
            (v.IBV_QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", attr.max_dest_rd_atomic),
            (v.IBV_QP_DEST_QPN, "dest_qp_num", attr.dest_qp_num),
        ) if mask & bit}

    def connect(self, *, qp_num, private_data=b"", responder_resources=0, initiator_depth=0, retry_count=0,
                rnr_retry_count=0, srq=False):
        """Request a connection (``rdma_connect``). The arguments are the members of ``struct rdma_conn_param``.

        The result arrives as an event: CONNECT_RESPONSE if the peer has accepted, otherwise for example REJECTED,
        UNREACHABLE or CONNECT_ERROR.

        :param qp_num: number of the local queue pair.
        :param private_data: bytes for the peer; the transport allows at most 56.
        :param responder_resources: number of RDMA READ and atomic requests of the peer that may be in flight.
        :param initiator_depth: number of RDMA READ and atomic requests that may be in flight from here.
        :param retry_count: number of retries without an acknowledgement, 0..7.
        :param rnr_retry_count: number of retries when the peer has no receive posted, 0..7.
        :param srq: whether the queue pair uses a shared receive queue.
        :raises OverflowError: a number does not fit in its field, or `private_data` has more than 255 bytes.
        :raises VerbsError: ``rdma_connect`` failed; with EINVAL if no address was resolved, with EOPNOTSUPP for an
            iWARP device.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef rdma_conn_param param
        cdef int failed, error
        cdef bytes data = bytes(private_data)
        _fill(&param, data, qp_num, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq)
        self._use_bound("rdma_connect")
        with nogil:
            failed = _table.connect(self.pointer, &param)
            error = errno
        self._finish(failed, error, "rdma_connect")

    def establish(self):
        """Confirm to the peer, which has accepted the connection, that the local queue pair is ready
        (``rdma_establish``).

        :raises VerbsError: ``rdma_establish`` failed; with EINVAL if no address was resolved, with EOPNOTSUPP for an
            iWARP device.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef int failed, error
        self._use_bound("rdma_establish")
        with nogil:
            failed = _table.establish(self.pointer)
            error = errno
        self._finish(failed, error, "rdma_establish")

    def accept(self, *, qp_num, private_data=b"", responder_resources=0, initiator_depth=0, rnr_retry_count=0,
               srq=False):
        """Accept the connection request of this identifier (``rdma_accept``).

        The result arrives as an event: ESTABLISHED if the connection can be used, otherwise for example CONNECT_ERROR.

        :param qp_num: number of the local queue pair.
        :param private_data: bytes for the peer.
        :param responder_resources: number of RDMA READ and atomic requests of the peer that may be in flight.
        :param initiator_depth: number of RDMA READ and atomic requests that may be in flight from here.
        :param rnr_retry_count: number of retries when the peer has no receive posted, 0..7.
        :param srq: whether the queue pair uses a shared receive queue.
        :raises OverflowError: a number does not fit in its field, or `private_data` has more than 255 bytes.
        :raises VerbsError: ``rdma_accept`` failed; with EOPNOTSUPP for an iWARP device.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef rdma_conn_param param
        cdef int failed, error
        cdef bytes data = bytes(private_data)
        _fill(&param, data, qp_num, responder_resources, initiator_depth, 0, rnr_retry_count, srq)
        self._use_bound("rdma_accept")
        with nogil:
            failed = _table.accept(self.pointer, &param)
            error = errno
        self._finish(failed, error, "rdma_accept")

    def reject(self, private_data=b""):
        """Reject the connection request of this identifier (``rdma_reject``).

        :param private_data: bytes for the peer, at most 255.
        :raises OverflowError: `private_data` has more than 255 bytes.
        :raises VerbsError: ``rdma_reject`` failed.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef int failed, error
        cdef bytes data = bytes(private_data)
        cdef const char *start = data
        cdef uint8_t length = len(data)
        self._use("rdma_reject")
        with nogil:
            failed = _table.reject(self.pointer, start, length)
            error = errno
        self._finish(failed, error, "rdma_reject")

    def disconnect(self):
        """End the connection, or confirm that the peer has ended it (``rdma_disconnect``).

        :raises VerbsError: ``rdma_disconnect`` failed; with EINVAL if no address was resolved, with EOPNOTSUPP for an
            iWARP device.
        :raises AffinityError: the caller is not the channel's owner.
        :raises ClosedResourceError: the identifier is destroyed.
        :raises ConcurrentAccessError: another verb is in flight on an object of the same owner.
        """
        cdef int failed, error
        self._use_bound("rdma_disconnect")
        with nogil:
            failed = _table.disconnect(self.pointer)
            error = errno
        self._finish(failed, error, "rdma_disconnect")


cdef int _check(int failed, int error, str verb) except -1:
    # Raise VerbsError with the errno `error`, and with advice, if the function failed.
    if failed:
        raise VerbsError(verb, error, _ADVICE.get(error))
    return 0


cdef int _fill(
    rdma_conn_param *param, bytes data, qp_num, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq
) except -1:
    # Fill the parameters of rdma_connect and rdma_accept. Raise OverflowError if a number does not fit, or if there are
    # more than 255 bytes of data. The caller keeps `data` alive.
    memset(param, 0, sizeof(param[0]))
    param.private_data = <const char *>data
    param.private_data_len = len(data)
    param.qp_num = qp_num
    param.responder_resources = responder_resources
    param.initiator_depth = initiator_depth
    param.retry_count = retry_count
    param.rnr_retry_count = rnr_retry_count
    param.srq = bool(srq)
    return 0


cdef int _fill_address(sockaddr_storage *storage, address) except -1:
    # Fill `storage` from (host, port), or four values for IPv6. Raise ValueError for another number of values, OSError
    # if the host is not an IP address.
    cdef sockaddr_in *four = <sockaddr_in *>storage
    cdef sockaddr_in6 *six = <sockaddr_in6 *>storage
    cdef bytes packed
    memset(storage, 0, sizeof(storage[0]))
    if len(address) not in (2, 4):
        raise ValueError(f"an address is (host, port), or (host, port, flow_info, scope_id) for IPv6, got {address!r}")
    host, port = address[:2]
    if ":" in host:
        packed = socket.inet_pton(socket.AF_INET6, host)
        six.sin6_family = AF_INET6
        six.sin6_port = htons(port)
        memcpy(&six.sin6_addr, <const char *>packed, 16)
        if len(address) > 2:
            six.sin6_flowinfo, six.sin6_scope_id = v.htonl(address[2]), address[3]
    else:
        packed = socket.inet_pton(socket.AF_INET, host)
        four.sin_family = AF_INET
        four.sin_port = htons(port)
        memcpy(&four.sin_addr, <const char *>packed, 4)
    return 0


cdef object _read_address(const sockaddr *address):
    # Return (host, port), or four values for IPv6; None for other families.
    cdef const sockaddr_in *four = <const sockaddr_in *>address
    cdef const sockaddr_in6 *six = <const sockaddr_in6 *>address
    if address.sa_family == AF_INET:
        host = socket.inet_ntop(socket.AF_INET, (<const char *>&four.sin_addr)[:4])
        return host, ntohs(four.sin_port)
    if address.sa_family == AF_INET6:
        host = socket.inet_ntop(socket.AF_INET6, (<const char *>&six.sin6_addr)[:16])
        return host, ntohs(six.sin6_port), v.ntohl(six.sin6_flowinfo), six.sin6_scope_id
    return None                                         # not set, or an InfiniBand address
