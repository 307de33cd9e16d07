"""Immutable attributes of devices, ports, queue pairs, shared receive queues and allocators.

Fields have the names of the fields of the verbs' structures. Sizes are in bytes. GIDs and GUIDs are `bytes` in network
byte order.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from aioverbs._exports import publish
from aioverbs.types import AccessFlags, AtomicCap, LinkLayer, Mtu, PortState, QpState, WcStatus

__all__ = [
    "AddressVector",
    "AllocatorStatistics",
    "AllocatorUsage",
    "DeviceAttributes",
    "Execution",
    "FaultRecord",
    "FrameKind",
    "PortAttributes",
    "QpAttributes",
    "QpCapabilities",
    "ResourceKind",
    "SrqAttributes",
]

# Indexed by enum rdma_driver_id of the kernel's <rdma/ib_user_ioctl_verbs.h>.
_DRIVERS = (
    *("unknown", "mlx5", "mlx4", "cxgb3", "cxgb4", "mthca", "bnxt_re", "ocrdma", "nes", "irdma", "vmw_pvrdma"),
    *("qedr", "hns", "usnic", "rxe", "hfi1", "qib", "efa", "siw", "erdma", "mana", "ionic"),
)
_KINDS = {
    "mlx5": {
        1: "queue pair",
        2: "receive work queue",
        3: "doorbell record",
        4: "shared receive queue",
        5: "completion queue",
    },
    "ionic": {1: "completion queue", 2: "send queue", 3: "receive queue"},
}


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """Limits and identity of a device (``ibv_query_device``). Returned by `Device.attributes`."""

    fw_ver: str
    node_guid: bytes
    sys_image_guid: bytes
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_mr_size: int
    page_size_cap: int
    device_cap_flags: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_ah: int
    max_mw: int
    max_pkeys: int
    atomic_cap: AtomicCap
    phys_port_cnt: int


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """State and limits of a port (``ibv_query_port``). Returned by `Device.port`."""

    state: PortState
    max_mtu: Mtu
    active_mtu: Mtu
    gid_tbl_len: int
    pkey_tbl_len: int
    max_msg_sz: int
    lid: int
    sm_lid: int
    lmc: int
    link_layer: LinkLayer
    port_cap_flags: int
    active_width: int
    active_speed: int
    phys_state: int


@dataclass(frozen=True, slots=True)
class AddressVector:
    """Address vector, the path to a peer (``struct ibv_ah_attr``).

    :param dgid: GID of the peer, 16 bytes; empty for a path by LID alone, which InfiniBand has and RoCE does not.
    :param sgid_index: index of the source GID in the GID table of the local port.
    :param port_num: number of the local port, from 1.
    :param hop_limit: maximum number of routers on the path, 0..255.
    :param flow_label: flow label of the global route header, 0..2**20-1.
    :param traffic_class: traffic class of the global route header, 0..255.
    :param dlid: LID of the peer, or of a router on the path to it; 0 on RoCE.
    :param sl: service level, 0..15.
    :param src_path_bits: low bits of the source LID, for ports with several LIDs.
    :param static_rate: limit of the packet rate, a code of ``enum ibv_rate``; 0 for no limit.
    :raises ValueError: `dgid` is neither 16 bytes long nor empty. The other values are not checked here.
    """

    dgid: bytes = b""
    sgid_index: int = 0
    port_num: int = 1
    hop_limit: int = 64
    flow_label: int = 0
    traffic_class: int = 0
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0

    def __post_init__(self) -> None:
        if len(self.dgid) not in (0, 16):
            raise ValueError(f"`dgid` must have 16 bytes or none, got {len(self.dgid)}")


@dataclass(frozen=True, slots=True)
class QpCapabilities:
    """Capacity of a queue pair (``struct ibv_qp_cap``).

    :param max_send_wr: depth of the send queue, in work requests.
    :param max_recv_wr: depth of the receive queue, in work requests.
    :param max_send_sge: number of scatter/gather entries of a send work request.
    :param max_recv_sge: number of scatter/gather entries of a receive work request.
    :param max_inline_data: size of the data that a send work request may carry inline, in bytes.
    """

    max_send_wr: int = 16
    max_recv_wr: int = 16
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(frozen=True, slots=True)
class QpAttributes:
    """Attributes of a queue pair (``ibv_query_qp``). Returned by `QueuePair.query`.

    Attributes that no state transition has set yet are 0.
    """

    qp_state: QpState
    path_mtu: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: AccessFlags
    cap: QpCapabilities
    av: AddressVector
    pkey_index: int
    port_num: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    qkey: int
    cur_qp_state: QpState
    en_sqd_async_notify: bool
    sq_draining: bool
    sq_sig_all: bool


@dataclass(frozen=True, slots=True)
class SrqAttributes:
    """Attributes of a shared receive queue (``ibv_query_srq``). Returned by `SharedReceiveQueue.query`.

    :param max_wr: depth of the queue, in work requests.
    :param max_sge: number of scatter/gather entries of a work request.
    :param limit: number of work requests below which the device reports ``SRQ_LIMIT_REACHED``; 0 if not armed.
    """

    max_wr: int
    max_sge: int
    limit: int


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """Purpose of an allocation: the decoded ``resource_type`` of the callbacks of ``ibv_alloc_parent_domain``.

    :param provider: name of the driver that requests the memory, such as ``"mlx5"``; ``"aioverbs"`` for buffers. The
        software device uses the numbers of mlx5.
    :param kind: purpose of the memory, such as ``"doorbell record"``; ``"resource 7"`` if the code 7 is unknown.
    :param resource_type: undecoded number; 0 for buffers, which no provider requests.
    """

    provider: str
    kind: str
    resource_type: int

    @classmethod
    def decode(cls, resource_type: int) -> "ResourceKind":
        """Decode a resource type into the names of a driver and of a purpose. Never fails.

        :param resource_type: number of the driver in the upper 32 bits, code of that driver in the lower 32 bits; 0 for
            the library's own buffers.
        :returns: the decoded type. The name of an unknown driver or purpose contains its number: ``"resource 7"``.
        """
        if not resource_type:
            return cls("aioverbs", "buffer", 0)
        driver, code = resource_type >> 32, resource_type & 0xFFFFFFFF
        provider = _DRIVERS[driver] if driver < len(_DRIVERS) else f"driver {driver}"
        return cls(provider, _KINDS.get(provider, {}).get(code, f"resource {code}"), resource_type)

    def __str__(self) -> str:
        return f"{self.provider} {self.kind}"


@dataclass(frozen=True, slots=True)
class AllocatorUsage:
    """Allocations of one resource type. Returned by `RecordingAllocator.usage`.

    Bytes are counted as requested, without alignment.

    :param pieces: number of pieces allocated and not yet freed.
    :param size_bytes: sum of their sizes.
    :param peak_pieces: highest value of ``pieces`` so far.
    :param peak_bytes: highest value of ``size_bytes`` so far.
    :param allocations: number of requests so far that returned memory.
    :param defaults: number of requests so far that returned `USE_DEFAULT`.
    :param failures: number of requests so far that failed.
    """

    pieces: int
    size_bytes: int
    peak_pieces: int
    peak_bytes: int
    allocations: int
    defaults: int
    failures: int


@dataclass(frozen=True, slots=True)
class AllocatorStatistics:
    """Memory that a native allocator uses at one moment. Returned by `NativeAllocator.statistics`.

    Mappings include memory that is kept for later pieces. They also include all mappings of the allocator below this
    one, even if another allocator uses them.

    :param pieces: number of pieces allocated and not yet freed.
    :param mappings: number of memory mappings.
    :param mapped_bytes: sum of the sizes of the mappings.
    :param huge_bytes: part of ``mapped_bytes`` that is in huge pages.
    :param bound_bytes: part of ``mapped_bytes`` that is bound to the requested NUMA node.
    :param bookkeeping_bytes: size of the allocator's own records, not part of ``mapped_bytes``.
    """

    pieces: int
    mappings: int
    mapped_bytes: int
    huge_bytes: int
    bound_bytes: int
    bookkeeping_bytes: int


# Place where the software device executes requests: in the call that posts them, or in a thread of its own.
Execution = Literal["inline", "thread"]
# Kind of a frame between a queue pair and its peer in another process: see `FaultPlan`.
FrameKind = Literal["request_out", "answer_in", "request_in", "answer_out"]


class FaultRecord(NamedTuple):
    """Fault that the fault plan of the software device injected.

    :param kind: ``"verb"``: a call to a verb failed; ``"request"`` or ``"receive"``: a work request completed with an
        error; ``"loss"``: a message was lost; ``"drop"``, ``"duplicate"``, ``"delay"``: a frame was lost, sent twice or
        sent late; ``"cut"``: the stream was closed at a frame.
    :param subject: name of the verb, or number of the queue pair.
    :param ordinal: position of the call, request or frame in the count of its rule; for a random fault, position of the
        random draw.
    :param value: error number, completion status or kind of the frame; None for ``"loss"``.
    """

    kind: Literal["verb", "request", "receive", "loss", "drop", "duplicate", "delay", "cut"]
    subject: str | int
    ordinal: int
    value: int | WcStatus | FrameKind | None


publish(__name__)
