"""Protection domains of one RDMA device in several processes: ``ibv_import_device`` and ``ibv_import_pd``.

The documentation of ibv_share_pd says: "even though the same PD is shared by multiple contexts of an RDMA device or
processes". For processes, these verbs took its place.

Soft-RoCE lacks both verbs, and reports that. The shim's versions send the commands of an open context to the passed
descriptor, so the kernel sees the same as with a provider that has the verbs.
"""

import asyncio
import errno
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Self

import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    Device,
    Endpoint,
    ProtectionDomain,
    RemoteRegion,
    VerbsError,
    WcStatus,
    WorkCompletionError,
    import_device,
    open_device,
)
from aioverbs._sharing.messages import Reply, Request
from tests.conftest import ROOT
from tests.descriptors import descriptors
from tests.rdma.imports import Imports, imports
from tests.rdma.other_process import ACCESS, KEY, queue_pair
from tests.rdma.seam import rdma_devices

# Use the installed package with these tests.
START = f"import sys; sys.path.append({str(ROOT)!r}); from tests.rdma.other_process import run; run()"

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(240)]


@pytest.fixture
def name() -> str:
    return rdma_devices()[0]


@pytest.fixture
def shim() -> Iterator[Imports]:
    with imports() as made:
        yield made


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def kernel_domains(name: str) -> int:
    """Return the number of the kernel's protection domains of a device."""
    shown = subprocess.run(["rdma", "-j", "resource", "show", "pd"], check=True, capture_output=True, text=True).stdout
    return sum(each.get("ifname") == name for each in json.loads(shown or "[]"))


class OtherProcess:
    """A running `other_process`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, end: socket.socket) -> None:
        self.name = name
        self.process = process
        self.our_end = end

    @classmethod
    async def start(cls, name: str, ends: tuple[socket.socket, socket.socket]) -> Self:
        """Start the process on a device, with a socket pair whose second end is passed to it."""
        ours, theirs = ends
        with theirs:
            return cls(
                name,
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", START, name, str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                ),
                ours,
            )

    async def read_line(self) -> str:
        """Return the next line of output."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line, "the process has ended"
        return line.decode().strip()

    async def run_command(self, command: str) -> str:
        """Send a command; return its result."""
        self.start_command(command)
        return await self.read_line()

    def start_command(self, command: str) -> None:
        """Send a command without waiting for its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())

    async def import_domain(self, pd: ProtectionDomain) -> None:
        """Let the process import a domain."""
        async with pd.share(KEY) as shared:
            self.start_command(f"import {shared.id}")
            await shared.send(self.our_end)
            assert await self.read_line() == self.name

    async def end(self) -> None:
        """Close the input of the process, and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), 60) == 0

    async def kill(self) -> None:
        """Kill the process with everything open, if it still runs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.returncode is None:
            self.process.kill()
        await asyncio.wait_for(self.process.wait(), 60)


@asynccontextmanager
async def other_process(name: str) -> AsyncIterator[OtherProcess]:
    """Run a process; kill it at the end if it still runs."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with near:
        other = await OtherProcess.start(name, (near, far))
        try:
            yield other
        finally:
            await other.kill()


@asynccontextmanager
async def importer(device: Device, pd: ProtectionDomain) -> AsyncIterator[OtherProcess]:
    """Run a process that has imported a domain."""
    async with other_process(device.name) as other:
        await other.import_domain(pd)
        yield other


async def write_to(device: Device, pd: ProtectionDomain, other: OtherProcess, text: bytes, *, over_it: bool) -> None:
    """Write from this process into the other one's memory, by a queue pair of that process or of this one."""
    address, rkey = map(int, (await other.run_command("memory")).split())
    async with (
        device.resource_domain(pd) as domain,
        domain.register(64, ACCESS) as source,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        peer = far.local_endpoint()
        if over_it:
            peer = Endpoint.from_bytes(
                bytes.fromhex(await other.run_command(f"connect {bytes(near.local_endpoint()).hex()}"))
            )
        else:
            far.connect(near.local_endpoint(), ACCESS)
        near.connect(peer, ACCESS)
        source.buffer[: len(text)] = text
        await near.write(source[: len(text)], RemoteRegion(address, len(text), rkey))
    assert await other.run_command(f"look {len(text)}") == text.decode()
    if over_it:
        await other.run_command("disconnect")


async def test_the_provider_lacks_importing(name: str, ends: tuple[socket.socket, socket.socket]) -> None:
    before = descriptors()
    async with open_device(name) as device, device.protection_domain() as pd:
        said = f"ibv_import_device failed: EOPNOTSUPP .*the provider of {name} does not support it"
        with pytest.raises(VerbsError, match=said):
            await pd.share(KEY).open()
        own = int.from_bytes(device.attributes().node_guid) << 32 | 1
        with pytest.raises(VerbsError, match=said):
            await device.shared_protection_domain(own, KEY).open()
    if len(rdma_devices()) > 1:
        async with open_device(rdma_devices()[1]) as other:
            with pytest.raises(VerbsError, match=r"EXDEV .*is another one") as caught:
                await other.shared_protection_domain(own, KEY).open()
            assert caught.value.errno == errno.EXDEV
    async with open_device("soft0") as soft, soft.protection_domain() as pd, pd.share(KEY) as shared:
        async with open_device(name) as device:
            with pytest.raises(VerbsError, match="EXDEV"):
                await device.shared_protection_domain(shared.id, KEY).open()
        with pytest.raises(VerbsError, match=f"EXDEV .*and {soft.name} is another one"):
            await soft.shared_protection_domain(own, KEY).open()
    assert descriptors() == before


async def test_wrong_key_id_or_device(name: str, shim: Imports, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    async with open_device(name) as device, device.protection_domain() as pd, pd.share(KEY) as shared:
        for shared_id, key, error in (
            (shared.id, KEY ^ 1, errno.EACCES),
            (shared.id ^ 0x5555, KEY, errno.ENOENT),
            (shared.id ^ 1 << 40, KEY, errno.EXDEV),
        ):
            there = asyncio.create_task(import_device(far, shared_id, key).open())
            with pytest.raises(VerbsError) as refused:
                await shared.send(near)
            with pytest.raises(VerbsError) as caught:
                await there
            assert refused.value.errno == caught.value.errno == error
            # Likewise for an instance in its own context.
            with pytest.raises(VerbsError) as caught:
                await device.shared_protection_domain(shared_id, key).open()
            assert caught.value.errno == error
        with pytest.raises(VerbsError, match=r"EEXIST .*shared with another key"):
            await pd.share(KEY ^ 1).open()
        async with pd.share(KEY) as again:
            assert again.id == shared.id
        async with open_device(name) as stranger:
            with pytest.raises(VerbsError, match=r"ENOENT .*make one that did with import_device"):
                await stranger.shared_protection_domain(shared.id, KEY).open()


async def test_a_descriptor_of_another_device(
    name: str, shim: Imports, ends: tuple[socket.socket, socket.socket]
) -> None:
    if len(rdma_devices()) < 2:
        pytest.skip("needs two RDMA devices")
    near, far = ends
    async with (
        open_device(name) as device,
        open_device(rdma_devices()[1]) as stranger,
        device.protection_domain() as pd,
        pd.share(KEY) as shared,
    ):
        before = descriptors()
        there = asyncio.create_task(import_device(far, shared.id, KEY).open())
        request = Request.parse(await asyncio.get_running_loop().sock_recv(near, Request.SIZE))
        attached = [stranger.handle.dup_cmd_fd(), os.memfd_create("file")]
        socket.send_fds(near, [Reply.make(request, KEY, name, pd.handle.handle).pack()], attached)
        for each in attached:
            os.close(each)
        with pytest.raises(VerbsError, match=f"EXDEV .*and {stranger.name} is another one"):
            await there
        assert descriptors() == before


async def test_sharing_within_one_process(name: str, shim: Imports, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    before, domains = descriptors(), kernel_domains(name)
    async with open_device(name) as device, device.protection_domain() as pd, pd.share(KEY) as shared:
        sending = asyncio.create_task(shared.send(near))
        async with (
            import_device(far, shared.id, KEY) as imported,
            imported.shared_protection_domain(shared.id, KEY) as instance,
        ):
            await sending
            with pytest.raises(ClosedResourceError, match="cannot be opened again"):
                await imported.open()
            assert imported.name == name
            assert instance.handle.handle == pd.handle.handle
            with pytest.raises(VerbsError, match=r"EEXIST .*share it again there"):
                await instance.share(KEY).open()
            for each in (imported, device):
                async with each.shared_protection_domain(shared.id, KEY):
                    assert kernel_domains(name) == domains + 1
            async with (
                instance.register(64, ACCESS) as theirs,
                device.resource_domain(pd) as domain,
                domain.register(64, ACCESS) as ours,
                domain.completion_queue(64) as cq,
                domain.queue_pair(cq) as one,
                domain.queue_pair(cq) as two,
            ):
                one.connect(two.local_endpoint(), ACCESS)
                two.connect(one.local_endpoint(), ACCESS)
                ours.buffer[:4] = b"ours"
                await one.write(ours[:4], theirs.remote()[:4])
                assert bytes(theirs.buffer[:4]) == b"ours"
                async with device.protection_domain() as another, another.register(64, ACCESS) as foreign:
                    with pytest.raises(WorkCompletionError) as caught:
                        await one.write(ours[:4], foreign.remote()[:4])
                    assert caught.value.status is WcStatus.REM_ACCESS_ERR
    assert (descriptors(), kernel_domains(name)) == (before, domains)


async def test_two_processes(name: str, shim: Imports) -> None:
    async with open_device(name) as device, device.protection_domain() as pd, importer(device, pd) as other:
        await write_to(device, pd, other, b"by-ours", over_it=False)
        await write_to(device, pd, other, b"by-theirs", over_it=True)


# Steps of closing: one process closes its domain and device, the other its region, instance and device.
OURS, THEIRS = ["our pd", "our device"], ["region", "pd", "device"]
ORDERS = [
    [next(parts[place in taken]) for place in range(5)]
    for taken in itertools.combinations(range(5), 2)
    for parts in [(iter(THEIRS), iter(OURS))]
]


@pytest.mark.rdma_all
async def test_every_order_of_closing(name: str, shim: Imports) -> None:
    """The kernel's domain ends with the last instance, in whichever process; until then the other objects work."""
    domains = kernel_domains(name)
    async with other_process(name) as other:
        for order in ORDERS:
            device = await open_device(name).open()
            pd = await device.protection_domain().open()
            await other.import_domain(pd)
            instances = {"our pd", "pd"}
            for what in order:
                if what in THEIRS:
                    # The last one leaves no descriptor open.
                    assert await other.run_command(f"close {what}") == "closed", order
                else:
                    await (pd if what == "our pd" else device).aclose()
                instances.discard(what)
                assert kernel_domains(name) == domains + bool(instances), order
                if "pd" in instances:
                    assert await other.run_command("work") == "done", order
                if "our pd" in instances:
                    async with pd.register(64):
                        pass
        await other.end()
    assert kernel_domains(name) == domains


async def test_the_importing_process_dies(name: str, shim: Imports) -> None:
    """Objects of the dead process stay in the kernel, and the domain with them, as long as there is a descriptor."""
    domains = kernel_domains(name)
    async with open_device(name) as device:
        pd = await device.protection_domain().open()
        async with importer(device, pd) as other:
            assert await other.run_command("work") == "done"
            await other.kill()
        await pd.aclose()
        assert kernel_domains(name) == domains + 1
    assert kernel_domains(name) == domains


async def test_the_sharing_process_dies(name: str, shim: Imports, ends: tuple[socket.socket, socket.socket]) -> None:
    domains = kernel_domains(name)
    near, _ = ends
    other = await OtherProcess.start(name, ends)
    shared_id = int(await other.run_command("share"))
    async with import_device(near, shared_id, KEY) as device:
        async with device.shared_protection_domain(shared_id, KEY) as pd, pd.register(64, ACCESS):
            await other.kill()
            async with pd.register(64), queue_pair(device, pd) as qp:
                qp.connect(qp.local_endpoint(), ACCESS)
        # A region of the dead process keeps the domain until the last descriptor is closed.
        assert kernel_domains(name) == domains + 1
    assert kernel_domains(name) == domains
    with pytest.raises(BrokenResourceError):
        await import_device(near, shared_id, KEY).open()
