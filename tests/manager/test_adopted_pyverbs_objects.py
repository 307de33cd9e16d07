"""Adoption of protection domains and memory regions that the user made with pyverbs."""

import contextlib
import errno
import sys
import weakref
from typing import Any

import pytest

from aioverbs import (
    AccessFlags,
    BorrowedObjectClosedError,
    ClosedResourceError,
    RemoteRegion,
    VerbsError,
    WcStatus,
    WorkCompletionError,
    open_device,
)
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, needs
from tests.garbage import collect_garbage
from tests.manager.pyverbs_objects import MR, PD, ParentDomain, install, laid_out

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


@pytest.fixture(autouse=True)
def pyverbs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@contextlib.contextmanager
def lent_domain(device: Device) -> Any:
    """Provide a user's protection domain, and check at the end that it can be closed: nothing depends on it."""
    pd = PD(device.handle)
    yield pd
    pd.close()
    assert not pd.pointer


@needs(Capability.STAND_INS)
async def test_an_adopted_domain_works_like_an_own_one(device: Device) -> None:
    with lent_domain(device) as theirs:
        mr = MR(theirs, 4096, REMOTE)
        async with (
            device.adopt_protection_domain(theirs) as pd,
            pd.adopt_memory_region(mr, REMOTE) as region,
            device.resource_domain(pd) as domain,
            domain.adopt_memory_region(mr, REMOTE) as again,
            domain.register(64, REMOTE) as ours,
            domain.completion_queue(64) as cq,
            domain.queue_pair(cq) as near,
            domain.queue_pair(cq) as far,
        ):
            assert (len(region), region.address, region.access) == (4096, mr.buf, REMOTE)
            assert (region.lkey, region.rkey) == (mr.lkey, mr.rkey) == (again.lkey, again.rkey)
            assert region.remote() == RemoteRegion(mr.buf, 4096, mr.rkey)
            near.connect(far.local_endpoint(), REMOTE)
            far.connect(near.local_endpoint(), REMOTE)
            region.buffer[:5] = b"hello"
            assert bytes(mr.memory[:5]) == b"hello"
            await near.write(region[:5], ours.remote()[:5])
            await near.write(ours[:5], region.remote()[4000:4005])
            assert bytes(region.buffer[4000:4005]) == bytes(mr.memory[4000:4005]) == b"hello"
            # pyverbs cannot close its protection domain meanwhile, because resources were made from it.
            with pytest.raises(OSError, match="dealloc PD") as refused:
                theirs.close()
            assert refused.value.errno == errno.EBUSY
        assert theirs.pointer


@needs(Capability.STAND_INS, Capability.OBJECT_COUNTS)
async def test_adopted_objects_are_not_destroyed(device: Device) -> None:
    before = device.statistics()
    with lent_domain(device) as theirs:
        mr = MR(theirs, 64, REMOTE)
        for _ in range(2):
            async with device.adopt_protection_domain(theirs) as pd, pd.adopt_memory_region(mr, REMOTE):
                pass
        assert (dict(device.statistics().objects)["pds"], dict(device.statistics().objects)["mrs"]) == (1, 1)
    assert device.statistics() == before


@needs(Capability.STAND_INS)
async def test_adopted_objects_are_referenced_while_in_use(device: Device) -> None:
    with lent_domain(device) as theirs:
        mr = MR(theirs, 64, REMOTE)
        theirs.mrs.clear()  # pyverbs references children weakly
        kept = weakref.ref(mr)
        async with device.adopt_protection_domain(theirs) as pd:
            region = pd.adopt_memory_region(mr, REMOTE)
            async with region:
                del mr
                collect_garbage()
                still = kept()
                assert still is not None
                assert still.lkey == region.lkey
        still.close()


@needs(Capability.STAND_INS)
async def test_access_flags_decide_whether_the_buffer_is_writable(device: Device) -> None:
    with lent_domain(device) as theirs:
        mr = MR(theirs, 64, AccessFlags.REMOTE_READ)
        async with device.adopt_protection_domain(theirs) as pd:
            async with pd.adopt_memory_region(mr, AccessFlags.REMOTE_READ) as region:
                assert region.buffer.readonly
                assert len(region[8:16].buffer) == 8
            mr.buf = 0  # like a region of device memory
            async with pd.adopt_memory_region(mr, AccessFlags.REMOTE_READ) as region:
                assert region[8:].sge == (region.address + 8, 56, mr.lkey)
                with pytest.raises(ValueError, match="no memory in this process"):
                    region.buffer  # noqa: B018


# ---- Refused objects


@needs(Capability.STAND_INS)
async def test_closed_objects_are_refused(device: Device) -> None:
    with lent_domain(device) as theirs:
        mr = MR(theirs, 64, REMOTE)
        async with device.adopt_protection_domain(theirs) as pd:
            mr.close()
            with pytest.raises(ValueError, match="the pyverbs memory region is closed"):
                await pd.adopt_memory_region(mr, REMOTE).open()
        theirs.close()
        with pytest.raises(ValueError, match="the pyverbs protection domain is closed"):
            await device.adopt_protection_domain(theirs).open()


@needs(Capability.STAND_INS)
async def test_objects_of_other_contexts_are_refused(device: Device) -> None:
    async with open_device("soft0") as another:
        with lent_domain(device) as first, lent_domain(device) as second, lent_domain(another) as third:
            mr = MR(first, 64, REMOTE)
            for pd in (device.adopt_protection_domain(second), device.protection_domain()):
                async with pd:
                    with pytest.raises(ValueError, match="belongs to a different protection domain than"):
                        await pd.adopt_memory_region(mr, REMOTE).open()
            with pytest.raises(ValueError, match="belongs to a different context than"):
                await device.adopt_protection_domain(third).open()
            # Handles of different contexts can have the same number.
            async with another.adopt_protection_domain(third) as pd:
                assert third.handle in (first.handle, second.handle, third.handle)
                with pytest.raises(ValueError, match="belongs to a different protection domain than"):
                    await pd.adopt_memory_region(mr, REMOTE).open()


@needs(Capability.STAND_INS)
async def test_other_types_are_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = "mlx5_0"
    with lent_domain(device) as theirs:
        parent = ParentDomain(device.handle)
        with pytest.raises(TypeError, match="make parent domains over that"):
            await device.adopt_protection_domain(parent).open()
        parent.close()
        async with device.adopt_protection_domain(theirs) as pd:
            with pytest.raises(TypeError, match=r"expected a pyverbs\.mr\.MR, got str"):
                await pd.adopt_memory_region(wrong, REMOTE).open()
    with pytest.raises(TypeError, match=r"expected a pyverbs\.pd\.PD, got str"):
        await device.adopt_protection_domain(wrong).open()
    monkeypatch.delitem(sys.modules, "pyverbs.pd")  # pyverbs was never imported
    with pytest.raises(TypeError, match=r"expected a pyverbs\.pd\.PD, got str"):
        await device.adopt_protection_domain(wrong).open()


@needs(Capability.STAND_INS)
@pytest.mark.parametrize(
    "kind", [laid_out(3), laid_out(4, weak_references=1)], ids=["too small", "weak references elsewhere"]
)
async def test_objects_of_another_layout_are_refused(
    device: Device, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    install(monkeypatch, PD=kind)
    theirs = kind()
    theirs.pointer = 0xDEAD000
    with pytest.raises(RuntimeError, match=r"pyverbs\.pd\.so.*unknown object layout"):
        await device.adopt_protection_domain(theirs).open()


@needs(Capability.STAND_INS)
async def test_invalid_pointers_are_refused(device: Device) -> None:
    with lent_domain(device) as theirs, lent_domain(device) as other:
        mr, another = MR(theirs, 64, REMOTE), MR(theirs, 64, REMOTE)
        async with device.adopt_protection_domain(theirs) as pd:
            for name in ("lkey", "rkey", "length"):
                monkey: Any = type("Wrong", (MR,), {name: property(lambda _: 1)})
                mr.__class__ = monkey
                with pytest.raises(RuntimeError, match="points to another one"):
                    await pd.adopt_memory_region(mr, REMOTE).open()
                mr.__class__ = MR
            async with pd.adopt_memory_region(another, REMOTE):
                pass
        other.__class__ = type("WrongPD", (PD,), {"handle": property(lambda _: 77)})
        with pytest.raises(RuntimeError, match="points to another one"):
            await device.adopt_protection_domain(other).open()
        other.__class__ = PD


# ---- Objects that the user closes too early


@needs(Capability.STAND_INS)
async def test_a_memory_region_closed_by_the_user_early(device: Device) -> None:
    with lent_domain(device) as theirs:
        mr = MR(theirs, 64, REMOTE)
        async with (
            device.adopt_protection_domain(theirs) as pd,
            pd.completion_queue(64) as cq,
            pd.queue_pair(cq) as near,
            pd.queue_pair(cq) as far,
            pd.register(64, REMOTE) as ours,
            pd.adopt_memory_region(mr, REMOTE) as region,
        ):
            near.connect(far.local_endpoint(), REMOTE)
            far.connect(near.local_endpoint(), REMOTE)
            part, remote = region[:8], region.remote()[:8]
            mr.close()
            for ask in (
                lambda: region.lkey,
                lambda: region.address,
                lambda: region.buffer,
                lambda: part.sge,
                lambda: part.buffer,
                region.remote,
                lambda: region.handle.rkey,
            ):
                with pytest.raises(
                    BorrowedObjectClosedError, match="close objects of aioverbs before the pyverbs objects"
                ):
                    ask()
            with pytest.raises(ClosedResourceError):
                await near.write(part, ours.remote()[:8])
            assert near.query().qp_state.name == "RTS", "nothing was posted"
            with pytest.raises(WorkCompletionError) as caught:  # a peer may still know the key
                await near.write(ours[:8], remote)
            assert caught.value.status is WcStatus.REM_ACCESS_ERR


@needs(Capability.STAND_INS)
async def test_a_protection_domain_closed_by_the_user_early(device: Device) -> None:
    with lent_domain(device) as theirs:
        mr = MR(theirs, 64, REMOTE)
        async with (
            device.adopt_protection_domain(theirs) as pd,
            pd.adopt_memory_region(mr, REMOTE) as region,
            pd.completion_queue(64) as cq,
        ):
            theirs.close()  # and the memory region with it
            with pytest.raises(BorrowedObjectClosedError):
                region.remote()
            for resource in (
                pd.register(64),
                pd.parent_domain(),
                pd.queue_pair(cq),
                pd.shared_receive_queue(8),
                device.resource_domain(pd),
            ):
                with pytest.raises(BorrowedObjectClosedError) as caught:
                    await resource.open()
                assert isinstance(caught.value, VerbsError)
