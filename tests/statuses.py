"""Statuses of failed requests, which differ between devices."""

from aioverbs import Device, WcStatus
from tests.capabilities import Capability, capabilities

__all__ = ["accepted_statuses"]

_ALSO = {
    WcStatus.LOC_LEN_ERR: WcStatus.LOC_QP_OP_ERR,
    WcStatus.REM_INV_REQ_ERR: WcStatus.REM_OP_ERR,
    WcStatus.LOC_PROT_ERR: WcStatus.LOC_QP_OP_ERR,
}


def accepted_statuses(device: Device, status: WcStatus) -> frozenset[WcStatus]:
    """Return the statuses that a device may report where the InfiniBand specification defines `status`."""
    if Capability.EXACT_STATUSES in capabilities(device.name):
        return frozenset({status})
    return frozenset({status, _ALSO.get(status, status)})
