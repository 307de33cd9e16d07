"""Requests that do not complete until they may, on any device."""

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
_WORK_REQUEST_BYTES = 128  # at least as many as the kernel's have


def hold(device: Device, *qps: QueuePair) -> None:
    """From here on, what is posted to the send queues of these queue pairs is not begun.

    The software device is asked to, of them all; in SQD, where others are taken to, send queues do the same.
    """
    if Capability.FAULT_PLAN in capabilities(device.name):
        for qp in qps:
            device.faults.hold(qp.handle)
        return
    for qp in qps:
        qp.to_sqd()


def unhold(device: Device, *qps: QueuePair) -> None:
    """What was held goes on, where its queue pair has not ended meanwhile."""
    if Capability.FAULT_PLAN in capabilities(device.name):
        device.faults.unhold()
        return
    for qp in qps:
        if not qp.closed and qp.qp_state is QpState.SQD:
            go_on(device, qp)


def go_on(device: Device, qp: QueuePair) -> None:
    """Take a queue pair from SQD to RTS, and see that it begins what was posted meanwhile."""
    qp.to_rts()
    if not device.software:
        _ring(device, qp)


def _ring(device: Device, qp: QueuePair) -> None:
    """Tell a kernel device whose doorbell is a command to look at a send queue; others do not know that command.

    Soft-RoCE does not look by itself when a queue pair comes from SQD to RTS, but when more is posted.
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
