"""Verbs that aioverbs lacks, called by ctypes with the pointers of its objects."""

import ctypes

import pytest

from aioverbs import open_device
from tests.rdma.seam import rdma_devices

pytestmark = pytest.mark.rdma

_LIBIBVERBS = "libibverbs.so.1"
_STATE = 1  # IBV_QP_STATE
_ANY = ctypes.c_void_p


class Attributes(ctypes.Structure):
    """Beginning of the verbs' structures of attributes, and room for the rest."""

    _fields_ = [("first", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 1023)]


async def test_verbs_of_libibverbs_accept_the_pointers() -> None:
    returning_error = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, ctypes.POINTER(Attributes))
    library = ctypes.CDLL(_LIBIBVERBS)
    query_device, query_srq = (returning_error((name, library)) for name in ("ibv_query_device", "ibv_query_srq"))
    attributes = ctypes.POINTER(Attributes)
    query_qp = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, attributes, ctypes.c_int, attributes)(("ibv_query_qp", library))
    alloc_pd = ctypes.CFUNCTYPE(_ANY, _ANY)(("ibv_alloc_pd", library))
    dealloc_pd = ctypes.CFUNCTYPE(ctypes.c_int, _ANY)(("ibv_dealloc_pd", library))
    found, created = Attributes(), Attributes()
    async with (
        open_device(rdma_devices()[0]) as device,
        device.protection_domain() as pd,
        pd.completion_queue(64) as cq,
        pd.shared_receive_queue(8) as srq,
        pd.queue_pair(cq) as qp,
    ):
        assert query_device(device.handle.verbs_pointer, found) == 0
        assert ctypes.string_at(ctypes.addressof(found)).decode() == device.attributes().fw_ver
        assert query_qp(qp.handle.verbs_pointer, found, _STATE, created) == 0
        assert found.first == qp.query().qp_state
        assert query_srq(srq.handle.verbs_pointer, found) == 0
        assert found.first >= 8  # max_wr
        another = alloc_pd(device.handle.verbs_pointer)
        assert another
        assert dealloc_pd(another) == 0
