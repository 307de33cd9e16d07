"""Enumerations of ``<infiniband/verbs.h>``.

Each member has the name of the C constant without its prefix (``IBV_QPT_RC`` is ``QpType.RC``) and its ABI value. A
test compares the values with the header.
"""

from enum import IntEnum, IntFlag

from aioverbs._exports import publish

__all__ = [
    "AccessFlags",
    "AtomicCap",
    "EventType",
    "GidType",
    "LinkLayer",
    "Mtu",
    "MwType",
    "NodeType",
    "PortState",
    "QpAttrMask",
    "QpState",
    "QpType",
    "SendFlags",
    "SendOpcode",
    "TransportType",
    "WcFlags",
    "WcOpcode",
    "WcStatus",
]


class AccessFlags(IntFlag):
    """Access rights of a memory region, memory window or queue pair: ``IBV_ACCESS_*``."""

    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6
    HUGETLB = 1 << 7
    RELAXED_ORDERING = 1 << 20


class QpState(IntEnum):
    """State of a queue pair: ``IBV_QPS_*``."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7


class QpType(IntEnum):
    """Transport service of a queue pair: ``IBV_QPT_*``."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class QpAttrMask(IntFlag):
    """Mask of the attributes that ``ibv_modify_qp`` sets or ``ibv_query_qp`` reads: ``IBV_QP_*``."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


class SendOpcode(IntEnum):
    """Opcode of a send work request: ``IBV_WR_*``."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    DRIVER1 = 11
    ATOMIC_WRITE = 15


class SendFlags(IntFlag):
    """Flags of a send work request: ``IBV_SEND_*``."""

    FENCE = 1 << 0
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4


class WcStatus(IntEnum):
    """Status of a work completion: ``IBV_WC_*``."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


class WcOpcode(IntEnum):
    """Opcode of a work completion: ``IBV_WC_*``. Completions of receives have the bit ``RECV`` set."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    ATOMIC_WRITE = 9
    RECV = 1 << 7
    RECV_RDMA_WITH_IMM = (1 << 7) + 1
    TM_ADD = (1 << 7) + 2
    TM_DEL = (1 << 7) + 3
    TM_SYNC = (1 << 7) + 4
    TM_RECV = (1 << 7) + 5
    TM_NO_TAG = (1 << 7) + 6
    DRIVER1 = (1 << 7) + 7
    DRIVER2 = (1 << 7) + 8
    DRIVER3 = (1 << 7) + 9


class WcFlags(IntFlag):
    """Flags of a work completion, which say what its other fields carry: ``IBV_WC_*``."""

    GRH = 1 << 0
    WITH_IMM = 1 << 1
    IP_CSUM_OK = 1 << 2
    WITH_INV = 1 << 3
    TM_SYNC_REQ = 1 << 4
    TM_MATCH = 1 << 5
    TM_DATA_VALID = 1 << 6


class Mtu(IntEnum):
    """Path MTU: ``IBV_MTU_*``. The value of a member is the code of the ABI, `size` is the MTU in bytes.

    NONE is what providers report for a port that has no MTU, for example because it has no network interface. It is no
    path MTU of queue pairs.
    """

    NONE = 0
    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def size(self) -> int:
        """The MTU in bytes, such as 4096 for `MTU_4096`; 0 for `NONE`."""
        return 128 << self.value if self.value else 0


class MwType(IntEnum):
    """Type of a memory window: ``IBV_MW_TYPE_*``."""

    TYPE_1 = 1
    TYPE_2 = 2


class PortState(IntEnum):
    """State of a port: ``IBV_PORT_*``."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(IntEnum):
    """Link layer of a port: ``IBV_LINK_LAYER_*``."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class GidType(IntEnum):
    """Type of a GID, which decides the format of packets sent from it: ``enum ibv_gid_type``."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class NodeType(IntEnum):
    """Node type of a device: ``IBV_NODE_*``."""

    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7


class TransportType(IntEnum):
    """Transport type of a device: ``IBV_TRANSPORT_*``."""

    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4


class AtomicCap(IntEnum):
    """Scope in which the atomic operations of a device are atomic: ``IBV_ATOMIC_*``."""

    NONE = 0
    HCA = 1
    GLOB = 2


class EventType(IntEnum):
    """Type of an asynchronous event of a device: ``IBV_EVENT_*``."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


publish(__name__)
