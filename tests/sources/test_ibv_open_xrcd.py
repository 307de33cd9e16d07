"""ibv_open_xrcd(3), sentence by sentence."""

import errno
import os
from pathlib import Path

import pytest

from aioverbs import BusyResourceError, QpType, VerbsError
from aioverbs._core import engine
from aioverbs.device import Device, open_device


@pytest.fixture
def fd(tmp_path: Path) -> int:
    return os.open(tmp_path / "inode", os.O_CREAT | os.O_RDONLY)


async def test_opens_an_xrc_domain_for_the_context(device: Device) -> None:
    """ "ibv_open_xrcd() open an XRC domain for the RDMA device context context" """
    async with device.xrc_domain() as domain:
        assert domain.handle.context is device.handle
        assert domain.owner is None


async def test_o_creat_creates_and_has_no_effect_where_it_exists(device: Device, fd: int) -> None:
    """ "Indicates that an XRCD should be created and associated with the inode referenced by the given fd. If the XRCD
    exists, this flag has no effect" """
    with pytest.raises(VerbsError, match="EAGAIN"):
        await device.xrc_domain(fd, 0).open()
    async with device.xrc_domain(fd, os.O_CREAT), device.xrc_domain(fd, os.O_CREAT), device.xrc_domain(fd, 0):
        pass
    os.close(fd)


async def test_o_excl_fails_where_it_exists(device: Device, fd: int) -> None:
    """ "If O_EXCL and O_CREAT are set, open will fail if an XRCD associated with the inode exists." """
    async with device.xrc_domain(fd, os.O_CREAT | os.O_EXCL):
        with pytest.raises(VerbsError, match="EINVAL"):
            await device.xrc_domain(fd, os.O_CREAT | os.O_EXCL).open()
    async with device.xrc_domain(fd, os.O_CREAT | os.O_EXCL):
        pass
    os.close(fd)


async def test_without_an_inode_it_is_created(device: Device) -> None:
    """ "If fd equals -1, no inode is associated with the XRCD. To indicate that XRCD should be created, use oflag =
    O_CREAT" """
    with pytest.raises(VerbsError, match="EINVAL"):
        await device.xrc_domain(-1, 0).open()
    async with device.xrc_domain() as one, device.xrc_domain(-1, os.O_CREAT) as another:
        assert one.handle is not another.handle


async def test_the_last_reference_destroys_it(device: Device, fd: int) -> None:
    """ "ibv_close_xrcd() closes the XRCD xrcd. If this is the last reference, the XRCD will be destroyed." """
    async with open_device("soft0") as other:
        first = await device.xrc_domain(fd).open()
        async with other.xrc_domain(fd, 0):
            await first.aclose()
            async with other.xrc_domain(fd, 0):
                pass
        with pytest.raises(VerbsError, match="EAGAIN"):
            await other.xrc_domain(fd, 0).open()
    os.close(fd)


async def test_errno_indicates_the_failure_reason(device: Device) -> None:
    """ "NULL if the request fails"; "ibv_close_xrcd() returns 0 on success, or the value of errno on failure" """
    with pytest.raises(VerbsError) as caught:
        await device.xrc_domain(1 << 20).open()
    assert (caught.value.verb, caught.value.errno) == ("ibv_open_xrcd", errno.EBADF)
    domain = await device.xrc_domain().open()
    device.handle.faults.fail("close_xrcd", errno.EIO)
    with pytest.raises(VerbsError, match="ibv_close_xrcd"):
        await domain.aclose()
    await domain.aclose()


async def test_closing_fails_while_something_is_associated(device: Device) -> None:
    """ "ibv_close_xrcd() may fail if any other resource is still associated with the XRCD being closed." """
    domain = await device.xrc_domain().open()
    qp = engine.QueuePair(xrc_domain=domain.handle, qp_type=QpType.XRC_RECV)
    with pytest.raises(BusyResourceError):
        await domain.aclose()
    qp.destroy()
    await domain.aclose()
    assert domain.closed
