"""Verbs that aioverbs lacks, called by ctypes with the pointers of its objects."""

import ctypes
import socket

import pytest

from aioverbs import VerbsError, open_device
from aioverbs.rdma_cm import Channel
from tests.rdma.cm import address_of, free_port
from tests.rdma.seam import rdma_devices

pytestmark = pytest.mark.rdma

_LIBIBVERBS = "libibverbs.so.1"
_STATE = 1  # IBV_QP_STATE
_TCP = 0x0106  # RDMA_PS_TCP
_ANY = ctypes.c_void_p


class Attributes(ctypes.Structure):
    """Beginning of the verbs' structures of attributes, and room for the rest."""

    _fields_ = [("first", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 1023)]


class IbvMr(ctypes.Structure):
    """The beginning of ``struct ibv_mr``."""

    _fields_ = [("context", _ANY), ("pd", _ANY), ("addr", _ANY), ("length", ctypes.c_size_t)]


class IbvCompChannel(ctypes.Structure):
    """The beginning of ``struct ibv_comp_channel``."""

    _fields_ = [("context", _ANY), ("fd", ctypes.c_int)]


async def test_verbs_of_libibverbs_accept_the_pointers() -> None:
    returning_error = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, ctypes.POINTER(Attributes))
    library = ctypes.CDLL(_LIBIBVERBS)
    query_device, query_srq = (returning_error((name, library)) for name in ("ibv_query_device", "ibv_query_srq"))
    attributes = ctypes.POINTER(Attributes)
    query_qp = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, attributes, ctypes.c_int, attributes)(("ibv_query_qp", library))
    alloc_pd = ctypes.CFUNCTYPE(_ANY, _ANY)(("ibv_alloc_pd", library))
    dealloc_pd = ctypes.CFUNCTYPE(ctypes.c_int, _ANY)(("ibv_dealloc_pd", library))
    reg_mr = ctypes.CFUNCTYPE(_ANY, _ANY, _ANY, ctypes.c_size_t, ctypes.c_int)(("ibv_reg_mr", library))
    dereg_mr = ctypes.CFUNCTYPE(ctypes.c_int, _ANY)(("ibv_dereg_mr", library))
    resize_cq = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, ctypes.c_int)(("ibv_resize_cq", library))
    found, created = Attributes(), Attributes()
    async with (
        open_device(rdma_devices()[0]) as device,
        device.protection_domain() as pd,
        pd.completion_queue(64) as cq,
        pd.shared_receive_queue(8) as srq,
        pd.queue_pair(cq) as qp,
        pd.register(64) as region,
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
        memory = ctypes.create_string_buffer(64)
        created_mr = reg_mr(pd.handle.verbs_pointer, ctypes.addressof(memory), 64, 1)
        assert created_mr
        assert dereg_mr(created_mr) == 0
        assert resize_cq(cq.handle.verbs_pointer, 100) == 0
        mr = IbvMr.from_address(region.handle.verbs_pointer)
        assert (mr.context, mr.pd) == (device.handle.verbs_pointer, pd.handle.verbs_pointer)
        assert (mr.addr, mr.length) == (region.address, 64)
        channel = cq.handle.channel
        assert channel is not None
        fields = IbvCompChannel.from_address(channel.verbs_pointer)
        assert (fields.context, fields.fd) == (device.handle.verbs_pointer, channel.fileno())


async def test_a_protection_domain_with_memory_of_the_user_does_not_close() -> None:
    library = ctypes.CDLL(_LIBIBVERBS)
    reg_mr = ctypes.CFUNCTYPE(_ANY, _ANY, _ANY, ctypes.c_size_t, ctypes.c_int)(("ibv_reg_mr", library))
    dereg_mr = ctypes.CFUNCTYPE(ctypes.c_int, _ANY)(("ibv_dereg_mr", library))
    memory = ctypes.create_string_buffer(64)
    async with open_device(rdma_devices()[0]) as device:
        pd = await device.protection_domain().open()
        mr = reg_mr(pd.handle.verbs_pointer, ctypes.addressof(memory), 64, 1)
        with pytest.raises(VerbsError, match="EBUSY"):
            await pd.aclose()
        assert dereg_mr(mr) == 0
        await pd.aclose()


async def test_functions_of_librdmacm_accept_the_pointers() -> None:
    library = ctypes.CDLL("librdmacm.so.1")
    create_id = ctypes.CFUNCTYPE(ctypes.c_int, _ANY, ctypes.POINTER(_ANY), _ANY, ctypes.c_int)(
        ("rdma_create_id", library)
    )
    destroy_id = ctypes.CFUNCTYPE(ctypes.c_int, _ANY)(("rdma_destroy_id", library))
    get_src_port = ctypes.CFUNCTYPE(ctypes.c_uint16, _ANY)(("rdma_get_src_port", library))
    port = free_port()
    async with Channel() as channel, channel.listener(address_of(rdma_devices()[0]), port) as listener:
        assert socket.ntohs(get_src_port(listener.handle.verbs_pointer)) == port
        created = _ANY()
        assert create_id(channel.handle.verbs_pointer, created, None, _TCP) == 0
        assert destroy_id(created) == 0
