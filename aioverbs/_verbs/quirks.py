"""Soft-RoCE, the kernel's rdma_rxe: which device is one, and what it must not be asked."""

from dataclasses import replace

from aioverbs._core.handles import handles
from aioverbs._verbs.qp_state_machine import Limits

__all__ = ["is_soft_roce", "without_growth"]

_VENDOR_ID = 0xFFFFFF


def is_soft_roce(context: handles.Context) -> bool:
    """Whether a device is soft-RoCE."""
    return context.attributes.vendor_id == _VENDOR_ID


def without_growth(limits: Limits, context: handles.Context, served: int | None) -> Limits:
    """What a queue pair may have that was told before to serve so many reads and atomics; None: it was told nothing.

    Told another number, soft-RoCE clears as many places as the new number says in the table that it made for the old
    one, before it makes another table. With a larger number it writes beyond its memory, into whatever else the kernel
    keeps there: `rxe_qp_from_attr` of Linux 4.8 to 6.1 at least, and a reset keeps the table. So a queue pair there
    serves as many as at first, or fewer.
    """
    if served is None or not is_soft_roce(context):
        return limits
    return replace(limits, max_dest_rd_atomic=min(limits.max_dest_rd_atomic, served))
