"""Hold work requests so that they do not complete until released, on any device."""

import contextlib
import ctypes
import os
import struct

from aioverbs import Device, QpState, QueuePair
from tests.capabilities import Capability, capabilities

__all__ = ["go_on", "hold", "unhold"]

# struct ib_uverbs_cmd_hdr and ib_uverbs_post_send of the kernel's <rdma/ib_user_verbs.h>, and the command's number.
_POST_SEND = struct.Struct("=IHHQIIII")
_POST_SEND_COMMAND = 28
_WORK_REQUEST_BYTES = 128  # at least the size of the kernel's work requests


def hold(device: Device, *qps: QueuePair) -> None:
    """Stop queue pairs from executing requests posted to their send queues from now on.

    The software device holds requests by its fault plan; on other devices, queue pairs enter SQD, in which send queues
    execute no new requests.
    """
    if Capability.FAULT_PLAN in capabilities(device.name):
        for qp in qps:
            device.faults.hold(qp.handle)
        return
    for qp in qps:
        qp.to_sqd()


def unhold(device: Device, *qps: QueuePair) -> None:
    """Execute the held requests, unless their queue pair was closed or failed meanwhile."""
    if Capability.FAULT_PLAN in capabilities(device.name):
        device.faults.unhold()
        return
    for qp in qps:
        if not qp.closed and qp.qp_state is QpState.SQD:
            go_on(device, qp)


def go_on(device: Device, qp: QueuePair) -> None:
    """Move a queue pair from SQD to RTS, and make it execute the requests posted meanwhile."""
    qp.to_rts()
    if not device.software:
        _ring(device, qp)


def _ring(device: Device, qp: QueuePair) -> None:
    """Ring the doorbell of a device whose doorbell is a command of the kernel; other devices reject the command.

    Soft-RoCE resumes a send queue only when more is posted, not on the transition from SQD to RTS.
    """
    bad = ctypes.c_uint32()
    words = _POST_SEND.size // 4
    command = _POST_SEND.pack(
        *(_POST_SEND_COMMAND, words, 1, ctypes.addressof(bad), qp.handle.handle, 0, 0, _WORK_REQUEST_BYTES)
    )
    descriptor = device.handle.dup_cmd_fd()
    try:
        with contextlib.suppress(OSError):
            os.write(descriptor, command)
    finally:
        os.close(descriptor)
