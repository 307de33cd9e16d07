"""What devices, ports and queue pairs tell of themselves, as immutable values.

Fields are named as in the verbs' structures; sizes are bytes, GIDs and GUIDs `bytes` in network order.
"""

from dataclasses import dataclass

from .types import AccessFlags, AtomicCap, LinkLayer, Mtu, PortState, QpState

__all__ = ["AddressVector", "DeviceAttributes", "PortAttributes", "QpAttributes", "QpCapabilities", "SrqAttributes"]


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
