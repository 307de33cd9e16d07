"""Pointers of verbs objects, for verbs that aioverbs lacks: the rules for their users."""

import ctypes
import errno
from typing import Any

import anyio.to_thread
import pytest

from aioverbs import AffinityError, VerbsError
from aioverbs._core.handles import handles
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, needs


def verb(handle: handles.Handle, name: str, result: Any, *arguments: Any) -> Any:
    address = ctypes.c_void_p.from_address(handle.context.table_slot(name)).value
    assert address is not None
    return ctypes.CFUNCTYPE(result, *arguments)(address)


@needs(Capability.STAND_INS)
async def test_a_domain_with_memory_of_the_user_closes_after_that(device: Device) -> None:
    memory = ctypes.create_string_buffer(64)
    pd = await device.protection_domain().open()
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    register = verb(pd.handle, "reg_mr", pointer, pointer, pointer, size, ctypes.c_int)
    mr = register(pd.handle.verbs_pointer, ctypes.addressof(memory), 64, 1)
    with pytest.raises(VerbsError, match="EBUSY") as caught:
        await pd.aclose()
    assert caught.value.errno == errno.EBUSY
    assert verb(pd.handle, "dereg_mr", ctypes.c_int, pointer)(mr) == 0
    await pd.aclose()


async def test_the_pointer_of_an_object_of_a_loop_is_read_on_its_thread(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq, domain.queue_pair(cq) as qp:
        for handle in (cq.handle, qp.handle):
            assert handle.verbs_pointer
            with pytest.raises(AffinityError):
                await anyio.to_thread.run_sync(lambda each: each.verbs_pointer, handle)
        assert await anyio.to_thread.run_sync(lambda: device.handle.verbs_pointer)
