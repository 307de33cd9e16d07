"""Workarounds for soft-RoCE, the kernel's rdma_rxe driver."""

from dataclasses import replace

from aioverbs._core.handles import handles
from aioverbs._verbs.qp_state_machine import Limits

__all__ = ["cap_max_dest_rd_atomic", "is_soft_roce"]

_VENDOR_ID = 0xFFFFFF


def is_soft_roce(context: handles.Context) -> bool:
    """Return whether a device is soft-RoCE.

    :raises VerbsError: the device cannot be queried.
    """
    return context.attributes.vendor_id == _VENDOR_ID


def cap_max_dest_rd_atomic(limits: Limits, context: handles.Context, previous: int | None) -> Limits:
    """Return limits that keep soft-RoCE from growing the responder resources of a queue pair.

    When ``max_dest_rd_atomic`` changes, soft-RoCE clears as many entries as the new value says in the table allocated
    for the old value, before allocating a new table. A larger value therefore writes beyond the table, into other
    memory of the kernel: see `rxe_qp_from_attr` of Linux 4.8 to at least 6.1. A reset keeps the table. So a queue pair
    on soft-RoCE never uses a larger value than its first one.

    :param limits: limits of the device port.
    :param context: context of the device.
    :param previous: ``max_dest_rd_atomic`` that was last set for the queue pair; None: never set.
    :returns: `limits` itself, except on soft-RoCE with `previous`: a copy with ``max_dest_rd_atomic`` at most that.
    """
    if previous is None or not is_soft_roce(context):
        return limits
    return replace(limits, max_dest_rd_atomic=min(limits.max_dest_rd_atomic, previous))
