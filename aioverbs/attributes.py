"""What devices, ports, queue pairs and allocators tell of themselves, as immutable values.

Fields are named as in the verbs' structures; sizes are bytes, GIDs and GUIDs `bytes` in network order.
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

# By number: enum rdma_driver_id of the kernel's <rdma/ib_user_ioctl_verbs.h>.
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
    """The limits and identity of a device: ``ibv_query_device``."""

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
    """The state and limits of a port: ``ibv_query_port``."""

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
    """The way to a peer: ``struct ibv_ah_attr``.

    :param dgid: the peer's GID, 16 bytes; empty for a path by LID alone, which InfiniBand has and RoCE has not.
    :param sgid_index: which of the port's own GIDs to send from.
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
            raise ValueError(f"a GID has 16 bytes, this one {len(self.dgid)}")


@dataclass(frozen=True, slots=True)
class QpCapabilities:
    """Depths of a queue pair's queues, in work requests, entries of their lists, and bytes: ``struct ibv_qp_cap``."""

    max_send_wr: int = 16
    max_recv_wr: int = 16
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(frozen=True, slots=True)
class QpAttributes:
    """The attributes of a queue pair: ``ibv_query_qp``. What its state has not set yet is 0."""

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
    """The size of a shared receive queue and its limit, both in work requests: ``ibv_query_srq``.

    `limit` is 0 where none is armed.
    """

    max_wr: int
    max_sge: int
    limit: int


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """What an allocator is asked memory for: the ``resource_type`` of ``ibv_alloc_parent_domain``, decoded.

    `provider` is the driver that asks, `kind` what it asks for: ``"doorbell record"``, or ``"resource 7"`` where that
    is not known. soft0 asks as mlx5 does. Buffers, which no provider asks for, have the resource type 0.
    """

    provider: str
    kind: str
    resource_type: int

    @classmethod
    def decode(cls, resource_type: int) -> "ResourceKind":
        """Decode a resource type.

        :param resource_type: the driver's number in the upper 32 bits, its own code in the lower.
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
    """What an allocator was asked for under one resource type. Bytes count as they were asked for.

    `pieces` and `size_bytes` are out now, `peak_pieces` and `peak_bytes` were at most; of all answers so far,
    `allocations` were memory, `defaults` were `USE_DEFAULT`, `failures` were none.
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
    """What a native allocator has out, and what that takes.

    `pieces` are out. `mappings` of `mapped_bytes` are where they and what is kept for more come from, including those
    of an allocator under this one, whoever uses them; of these bytes, `huge_bytes` are in huge pages and `bound_bytes`
    bound to the NUMA node that was asked for. `bookkeeping_bytes` stand beside them.
    """

    pieces: int
    mappings: int
    mapped_bytes: int
    huge_bytes: int
    bound_bytes: int
    bookkeeping_bytes: int


# Where the software device executes requests: in the call that posts them, or in a thread of its own.
Execution = Literal["inline", "thread"]
# A frame between a queue pair and its peer in another process: see `FaultPlan`.
FrameKind = Literal["request_out", "answer_in", "request_in", "answer_out"]


class FaultRecord(NamedTuple):
    """Something that the fault plan of the software device did.

    :param kind: a call of a verb that failed, a request or a receive that completed with an error, a message that was
        lost; a frame that was lost, came twice or late, or at which its stream was cut.
    :param subject: the verb's name, or the queue pair's number.
    :param ordinal: which one it was, as the rule counts them; by chance, which draw.
    :param value: the error number or the status; the kind of the frame; None for a loss.
    """

    kind: Literal["verb", "request", "receive", "loss", "drop", "duplicate", "delay", "cut"]
    subject: str | int
    ordinal: int
    value: int | WcStatus | FrameKind | None


publish(__name__)
