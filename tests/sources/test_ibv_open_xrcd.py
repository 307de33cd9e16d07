"""ibv_open_xrcd(3): one test for each sentence of the manual page."""

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aioverbs import AccessFlags, BusyResourceError, QpType, VerbsError, WorkCompletionError
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.pace import patience

# Program of another process: it opens and closes domains of an inherited descriptor by commands on its input.
OTHER = """
import asyncio, errno, sys
from aioverbs import VerbsError, open_device

async def main(name, fd):
    held = []
    async with open_device(name) as device:
        for line in sys.stdin:
            match line.split():
                case ["open", oflag]:
                    try:
                        held.append(await device.xrc_domain(fd, int(oflag)).open())
                        answer = "opened"
                    except VerbsError as error:
                        answer = errno.errorcode[error.errno]
                case ["close"]:
                    await held.pop().aclose()
                    answer = "closed"
            print(answer, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@dataclass
class OtherProcess:
    process: asyncio.subprocess.Process

    async def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        return (await asyncio.wait_for(self.process.stdout.readline(), patience(20))).decode().strip()

    async def open(self, oflag: int) -> str:
        """Open an XRC domain there; return the result that the process reports."""
        return await self.ask(f"open {oflag}")


@contextlib.asynccontextmanager
async def another_process(device: Device, fd: int) -> AsyncIterator[OtherProcess]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", OTHER, device.name, str(fd)), stdin=pipe, stdout=pipe, pass_fds=[fd]
    )
    try:
        yield OtherProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), patience(20))


@pytest.fixture
def fd(tmp_path: Path) -> int:
    return os.open(tmp_path / "inode", os.O_CREAT | os.O_RDONLY)


@needs(Capability.XRC_DOMAINS)
async def test_opens_an_xrc_domain_for_the_context(device: Device) -> None:
    """ "ibv_open_xrcd() open an XRC domain for the RDMA device context context" """
    async with device.xrc_domain() as domain:
        assert domain.handle.context is device.handle
        assert domain.owner is None


@needs(Capability.XRC_DOMAINS)
async def test_o_creat_creates_and_has_no_effect_where_it_exists(device: Device, fd: int) -> None:
    """ "Indicates that an XRCD should be created and associated with the inode referenced by the given fd. If the XRCD
    exists, this flag has no effect" """
    with pytest.raises(VerbsError, match=r"EAGAIN .*: no process has an XRC domain of this inode"):
        await device.xrc_domain(fd, 0).open()
    async with device.xrc_domain(fd, os.O_CREAT), device.xrc_domain(fd, os.O_CREAT), device.xrc_domain(fd, 0):
        pass
    os.close(fd)


@needs(Capability.XRC_DOMAINS)
async def test_o_excl_fails_where_it_exists(device: Device, fd: int) -> None:
    """ "If O_EXCL and O_CREAT are set, open will fail if an XRCD associated with the inode exists." """
    async with device.xrc_domain(fd, os.O_CREAT | os.O_EXCL):
        with pytest.raises(VerbsError, match=r"EINVAL .*: an XRC domain of this inode exists already"):
            await device.xrc_domain(fd, os.O_CREAT | os.O_EXCL).open()
    async with device.xrc_domain(fd, os.O_CREAT | os.O_EXCL):
        pass
    os.close(fd)


@needs(Capability.XRC_DOMAINS)
async def test_without_an_inode_it_is_created(device: Device) -> None:
    """ "If fd equals -1, no inode is associated with the XRCD. To indicate that XRCD should be created, use oflag =
    O_CREAT" """
    with pytest.raises(VerbsError, match="EINVAL"):
        await device.xrc_domain(-1, 0).open()
    async with device.xrc_domain() as one, device.xrc_domain(-1, os.O_CREAT) as another:
        assert one.handle is not another.handle


@needs(Capability.XRC_DOMAINS)
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


@needs(Capability.XRC_DOMAINS)
async def test_the_inode_is_the_same_for_all_processes(device: Device, fd: int) -> None:
    """ "associated with the inode referenced by the given fd"; "If this is the last reference, the XRCD will be
    destroyed.": also if another process holds it"""
    async with another_process(device, fd) as other:
        assert await other.open(0) == "EAGAIN"
        first = await device.xrc_domain(fd, os.O_CREAT | os.O_EXCL).open()
        assert await other.open(os.O_CREAT | os.O_EXCL) == "EINVAL"
        assert await other.open(0) == "opened"
        await first.aclose()
        with pytest.raises(VerbsError, match="EINVAL"):
            await device.xrc_domain(fd, os.O_CREAT | os.O_EXCL).open()
        async with device.xrc_domain(fd, 0):
            pass
        assert await other.ask("close") == "closed"
        with pytest.raises(VerbsError, match="EAGAIN"):
            await device.xrc_domain(fd, 0).open()
    os.close(fd)


@needs(Capability.XRC_DOMAINS)
async def test_a_process_that_was_killed_has_no_reference(device: Device, fd: int) -> None:
    """ "If this is the last reference, the XRCD will be destroyed.": the system drops references of ended processes"""
    async with another_process(device, fd) as other:
        assert await other.open(os.O_CREAT) == "opened"
        async with device.xrc_domain(fd, 0):
            pass
        other.process.kill()
        await asyncio.wait_for(other.process.wait(), patience(20))
        with pytest.raises(VerbsError, match="EAGAIN"):
            await device.xrc_domain(fd, 0).open()
        async with device.xrc_domain(fd, os.O_CREAT | os.O_EXCL):
            pass
    os.close(fd)


@needs(Capability.FAULT_PLAN, Capability.XRC_DOMAINS)
async def test_errno_indicates_the_failure_reason(device: Device) -> None:
    """ "NULL if the request fails"; "ibv_close_xrcd() returns 0 on success, or the value of errno on failure" """
    with pytest.raises(VerbsError) as caught:
        await device.xrc_domain(1 << 20).open()
    assert (caught.value.verb, caught.value.errno) == ("ibv_open_xrcd", errno.EBADF)
    domain = await device.xrc_domain().open()
    device.faults.fail("close_xrcd", errno.EIO)
    with pytest.raises(VerbsError, match="ibv_close_xrcd"):
        await domain.aclose()
    await domain.aclose()


@needs(Capability.XRC_DOMAINS)
async def test_closing_fails_while_a_resource_is_associated(device: Device) -> None:
    """ "ibv_close_xrcd() may fail if any other resource is still associated with the XRCD being closed." """
    domain = await device.xrc_domain().open()
    async with domain.queue_pair():
        with pytest.raises(BusyResourceError, match=r"QueuePair .* is associated with it"):
            await domain.aclose()
    async with (
        device.protection_domain() as pd,
        pd.completion_queue(64) as cq,
        pd.shared_receive_queue(4, xrc_domain=domain, cq=cq),
    ):
        with pytest.raises(BusyResourceError, match=r"SharedReceiveQueue .* is associated with it"):
            await domain.aclose()
    await domain.aclose()
    assert domain.closed


@needs(Capability.XRC_DOMAINS)
async def test_messages_reach_the_shared_receive_queue_that_they_name(device: Device) -> None:
    """ "ibv_create_srq_ex(3), ibv_create_qp_ex(3)": queues made with an XRC domain."""
    async with (
        device.xrc_domain() as xrc,
        device.resource_domain() as domain,
        domain.register(64, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE) as region,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64) as received,
        domain.shared_receive_queue(4, xrc_domain=xrc, cq=received) as srq,
        domain.queue_pair(cq, qp_type=QpType.XRC_SEND) as sender,
        xrc.queue_pair() as receiver,
    ):
        sender.connect(receiver.local_endpoint())
        receiver.connect(sender.local_endpoint(), AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)
        receive = srq.receive(region[32:])
        region.buffer[:4] = b"sent"
        await sender.send(region[:4], srq_number=srq.number)
        assert bytes((await receive).data) == b"sent"
        await sender.write(region[:4], region.remote()[8:12], srq_number=srq.number)
        assert bytes(region.buffer[8:12]) == b"sent"
        with pytest.raises(WorkCompletionError, match="REM_INV_REQ_ERR"):
            await sender.write(region[:4], region.remote()[8:12], srq_number=srq.number + 1)
        assert (srq.query().max_wr, srq.query().limit) == (4, 0)
        with pytest.raises(ValueError, match="of type XRC_RECV, which does not support SEND"):
            await receiver.send(region[:4])
        with pytest.raises(ValueError, match="`xrc_domain` and `cq` go together"):
            domain.shared_receive_queue(4, cq=cq)
        with pytest.raises(ValueError, match=r"make it with XrcDomain.queue_pair\(\)"):
            domain.queue_pair(cq, qp_type=QpType.XRC_RECV)
