"""Workarounds for soft-RoCE, the kernel's rdma_rxe driver."""

from dataclasses import replace

from aioverbs._core.handles import handles
from aioverbs._verbs.qp_state_machine import Limits

__all__ = ["cap_max_dest_rd_atomic", "is_soft_roce"]

_VENDOR_ID = 0xFFFFFF


def is_soft_roce(context: handles.Context) -> bool:
    """Return whether a device is a soft-RoCE device, which the kernel implements in software.

    :raises VerbsError: the device cannot be queried.
    """
    return context.attributes.vendor_id == _VENDOR_ID


def cap_max_dest_rd_atomic(limits: Limits, context: handles.Context, previous: int | None) -> Limits:
    """Return limits under which the ``max_dest_rd_atomic`` of a queue pair on soft-RoCE never grows.

    When ``max_dest_rd_atomic`` changes, soft-RoCE first clears as many entries as the new value says in the table that
    was allocated for the old value, and then allocates a new table. If the new value is larger, the kernel therefore
    overwrites other memory of its own: see `rxe_qp_from_attr` in Linux 4.8 to at least 6.1. A reset keeps the table. So
    a queue pair on soft-RoCE must never use a larger value than its first one.

    :param limits: limits of the device port.
    :param context: context of the device.
    :param previous: ``max_dest_rd_atomic`` that was last set for the queue pair; None if it was never set.
    :returns: on soft-RoCE, if `previous` is given, a copy of `limits` whose ``max_dest_rd_atomic`` is at most
        `previous`; otherwise `limits` itself.
    :raises VerbsError: the device cannot be queried.
    """
    if previous is None or not is_soft_roce(context):
        return limits
    return replace(limits, max_dest_rd_atomic=min(limits.max_dest_rd_atomic, previous))
