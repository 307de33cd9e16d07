"""Post and poll through the verbs ABI, bypassing the library's data path.

Arguments reach the provider unchanged: nothing is checked, kept alive or awaited, and the test must call from the right
thread. Structures and ops are those of <infiniband/verbs.h>: see `aioverbs/_core/abi/libibverbs.h`.
"""

import ctypes
import errno
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from aioverbs import AccessFlags, MwType, SendOpcode, VerbsError, WcFlags, WcStatus
from aioverbs._core.handles import handles

__all__ = ["Completion", "Sge", "bind_window", "poll", "post_recv", "post_send"]

Sge = tuple[int, int, int]  # address, length in bytes, lkey

_INT, _U32, _U64, _ADDRESS = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
# Indices of function pointers in `struct ibv_context_ops`, which follows the first pointer of a context.
_OPS = {"bind_mw": 8, "poll_cq": 11, "post_srq_recv": 20, "post_send": 25, "post_recv": 26}
_VERB = ctypes.CFUNCTYPE(_INT, _ADDRESS, _ADDRESS, _ADDRESS)
_POLL = ctypes.CFUNCTYPE(_INT, _ADDRESS, _INT, _ADDRESS)
_START_POLL = ctypes.CFUNCTYPE(_INT, _ADDRESS, _ADDRESS)
_READ_BY_A_CALL = "opcode", "vendor_err", "byte_len", "imm_data", "qp_num", "src_qp", "wc_flags"
_READ = ctypes.CFUNCTYPE(_U32, _ADDRESS)


class _Sge(ctypes.Structure):
    _fields_ = [("addr", _U64), ("length", _U32), ("lkey", _U32)]


class _Rdma(ctypes.Structure):
    _fields_ = [("remote_addr", _U64), ("rkey", _U32)]


class _Atomic(ctypes.Structure):
    _fields_ = [("remote_addr", _U64), ("compare_add", _U64), ("swap", _U64), ("rkey", _U32)]


class _Datagram(ctypes.Structure):
    _fields_ = [("ah", _ADDRESS), ("remote_qpn", _U32), ("remote_qkey", _U32)]


class _Wr(ctypes.Union):
    _fields_ = [("rdma", _Rdma), ("atomic", _Atomic), ("ud", _Datagram)]


class _BindInfo(ctypes.Structure):
    _fields_ = [("mr", _ADDRESS), ("addr", _U64), ("length", _U64), ("mw_access_flags", _U32)]


class _BindMw(ctypes.Structure):
    _fields_ = [("mw", _ADDRESS), ("rkey", _U32), ("bind_info", _BindInfo)]


class _MwBind(ctypes.Structure):
    _fields_ = [("wr_id", _U64), ("send_flags", _U32), ("bind_info", _BindInfo)]


class _RecvWr(ctypes.Structure):
    _fields_ = [("wr_id", _U64), ("next", _ADDRESS), ("sg_list", ctypes.POINTER(_Sge)), ("num_sge", _INT)]


class _SendWr(ctypes.Structure):
    _fields_ = [
        *_RecvWr._fields_,
        ("opcode", _INT),
        ("send_flags", _U32),
        ("imm_data", _U32),  # or the key to invalidate, in host order
        ("wr", _Wr),
        ("remote_srqn", _U32),
        ("bind_mw", _BindMw),
    ]


class _Wc(ctypes.Structure):
    _fields_ = [
        ("wr_id", _U64),
        ("status", _INT),
        ("opcode", _INT),
        ("vendor_err", _U32),
        ("byte_len", _U32),
        ("imm_data", _U32),  # or the key that was invalidated, in host order
        ("qp_num", _U32),
        ("src_qp", _U32),
        ("wc_flags", _U32),
        ("pkey_index", ctypes.c_uint16),
        ("slid", ctypes.c_uint16),
        ("sl", ctypes.c_uint8),
        ("dlid_path_bits", ctypes.c_uint8),
    ]


class _CqEx(ctypes.Structure):
    _fields_ = [
        ("head", _U64 * 4),
        ("mutex", _U64 * (6 if platform.machine() == "aarch64" else 5)),
        ("cond", _U64 * 6),
        ("events", _U32 * 2),
        ("comp_mask", _U32),
        ("status", _INT),
        ("wr_id", _U64),
        *((name, _ADDRESS) for name in ("start_poll", "next_poll", "end_poll", *_READ_BY_A_CALL)),
    ]


class _Mw(ctypes.Structure):
    _fields_ = [("context", _ADDRESS), ("pd", _ADDRESS), ("rkey", _U32)]


@dataclass(frozen=True)
class Completion:
    """A completion: ``struct ibv_wc``. On an error, only `wr_id`, `status`, `vendor_err` and `qp_num` are valid.

    `imm_data` is valid with ``WcFlags.WITH_IMM``, `invalidated_rkey` with ``WcFlags.WITH_INV``; both in host order.
    """

    wr_id: int
    status: WcStatus
    opcode: int
    vendor_err: int
    byte_len: int
    imm_data: int
    invalidated_rkey: int
    qp_num: int
    src_qp: int
    wc_flags: int


def _op_of(handle: handles.Handle, name: str) -> int:
    return _U64.from_address(handle.context.verbs_pointer + 8 * (1 + _OPS[name])).value


def _call(verb: str, op: str, handle: handles.Handle, second: object, third: object) -> None:
    error = abs(_VERB(_op_of(handle, op))(handle.verbs_pointer, second, third))
    if error:
        raise VerbsError(verb, error)


def _entries(sges: Sequence[Sge]) -> "ctypes.Array[_Sge]":
    return (_Sge * len(sges))(*(_Sge(*sge) for sge in sges))


def post_send(
    qp: handles.QueuePair,
    opcode: SendOpcode | int,
    sges: Sequence[Sge] = (),
    *,
    wr_id: int = 0,
    flags: int = 0,
    remote_addr: int = 0,
    rkey: int = 0,
    imm_data: int = 0,
    compare_add: int = 0,
    swap: int = 0,
    invalidate_rkey: int = 0,
    ah: handles.AddressHandle | None = None,
    remote_qpn: int = 0,
    remote_qkey: int = 0,
    remote_srqn: int = 0,
) -> None:
    """Post a send work request: ``ibv_post_send``.

    :param imm_data: in host order.
    :raises VerbsError: the verb failed.
    """
    invalidates = opcode in (SendOpcode.SEND_WITH_INV, SendOpcode.LOCAL_INV)
    wr = _SendWr(wr_id=wr_id, sg_list=_entries(sges), num_sge=len(sges), opcode=opcode, send_flags=flags)
    wr.imm_data = invalidate_rkey if invalidates else socket.htonl(imm_data)
    wr.remote_srqn = remote_srqn
    if ah is not None:
        wr.wr.ud = _Datagram(ah.verbs_pointer, remote_qpn, remote_qkey)
    elif opcode in (SendOpcode.ATOMIC_CMP_AND_SWP, SendOpcode.ATOMIC_FETCH_AND_ADD):
        wr.wr.atomic = _Atomic(remote_addr, compare_add, swap, rkey)
    else:
        wr.wr.rdma = _Rdma(remote_addr, rkey)
    _call("ibv_post_send", "post_send", qp, ctypes.byref(wr), ctypes.byref(_ADDRESS()))


def post_recv(
    queue: handles.QueuePair | handles.SharedReceiveQueue, sges: Sequence[Sge] = (), *, wr_id: int = 0
) -> None:
    """Post a receive: ``ibv_post_recv``, or ``ibv_post_srq_recv``.

    :raises VerbsError: the verb failed.
    """
    op = "post_recv" if isinstance(queue, handles.QueuePair) else "post_srq_recv"
    wr = _RecvWr(wr_id=wr_id, sg_list=_entries(sges), num_sge=len(sges))
    _call(f"ibv_{op}", op, queue, ctypes.byref(wr), ctypes.byref(_ADDRESS()))


def bind_window(
    qp: handles.QueuePair,
    window: handles.MemoryWindow,
    region: handles.MemoryRegion | None,
    address: int,
    length: int,
    access: AccessFlags | int,
    *,
    wr_id: int = 0,
    flags: int = 0,
    rkey: int | None = None,
) -> None:
    """Post a request that binds a memory window: ``ibv_bind_mw``, or ``IBV_WR_BIND_MW`` for one of type 2.

    :param rkey: new key of a window of type 2; None: the key after the current one.
    :raises VerbsError: the verb failed; the window keeps its old key.
    """
    info = _BindInfo(None if region is None else region.verbs_pointer, address, length, access)
    mw = window.verbs_pointer
    if window.mw_type is MwType.TYPE_1:
        bind = _MwBind(wr_id, flags, info)
        _call("ibv_bind_mw", "bind_mw", qp, mw, ctypes.byref(bind))
        return
    key = rkey if rkey is not None else window.rkey & ~0xFF | window.rkey + 1 & 0xFF
    wr = _SendWr(wr_id=wr_id, opcode=SendOpcode.BIND_MW, send_flags=flags, bind_mw=_BindMw(mw, key, info))
    _call("ibv_post_send", "post_send", qp, ctypes.byref(wr), ctypes.byref(_ADDRESS()))
    _Mw.from_address(mw).rkey = key  # providers leave this to their callers


def poll(cq: handles.CompletionQueue, count: int = 16) -> list[Completion]:
    """Poll up to `count` completions: ``ibv_poll_cq``, or ``ibv_start_poll`` and so on for an extended queue.

    :raises VerbsError: the verb failed; the error number is EIO if the device reports none.
    """
    address = cq.verbs_pointer
    if _U64.from_address(id(cq) + handles.Handle.__basicsize__ + 8).value:  # set only for an extended queue
        return _poll_extended(address, count)
    taken: list[Completion] = []
    found = wanted = 0
    while found == wanted and len(taken) < count:
        wanted = min(count - len(taken), 64)
        wcs = (_Wc * wanted)()
        found = _POLL(_op_of(cq, "poll_cq"))(address, wanted, ctypes.byref(wcs))
        if found < 0 and not taken:
            raise VerbsError("ibv_poll_cq", -found if cq.context.software else errno.EIO)
        taken += map(_completion, wcs[: max(found, 0)])
    return taken


def _poll_extended(address: int, count: int) -> list[Completion]:
    cq = _CqEx.from_address(address)
    error = _START_POLL(cq.start_poll)(address, ctypes.byref(_U64()))  # struct ibv_poll_cq_attr with comp_mask 0
    if error:
        if error != errno.ENOENT:
            raise VerbsError("ibv_start_poll", error)
        return []
    taken = []
    while True:
        wc = _Wc(wr_id=cq.wr_id, status=cq.status)
        failed = cq.status != WcStatus.SUCCESS
        for name in ("vendor_err", "qp_num") if failed else _READ_BY_A_CALL:
            setattr(wc, name, _READ(getattr(cq, name))(address))
        taken.append(_completion(wc))
        if len(taken) == count or _READ(cq.next_poll)(address):
            break
    _READ(cq.end_poll)(address)
    return taken


def _completion(wc: _Wc) -> Completion:
    return Completion(
        wr_id=wc.wr_id,
        status=WcStatus(wc.status),
        opcode=wc.opcode,
        vendor_err=wc.vendor_err,
        byte_len=wc.byte_len,
        imm_data=socket.ntohl(wc.imm_data) if wc.wc_flags & WcFlags.WITH_IMM else 0,
        invalidated_rkey=wc.imm_data if wc.wc_flags & WcFlags.WITH_INV else 0,
        qp_num=wc.qp_num,
        src_qp=wc.src_qp,
        wc_flags=wc.wc_flags,
    )
