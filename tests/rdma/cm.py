"""What the tests of rdma_cm share: addresses, two ends with their domains, and what the kernel counts."""

import asyncio
import contextlib
import ipaddress
import itertools
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from aioverbs import AccessFlags, Device, QpState, QueuePair, ResourceDomain, ThreadModel, devices, open_device
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs.rdma_cm import Channel, Identifier, Listener
from tests.rdma.seam import rdma_devices

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
_ports = itertools.count(17000)


def address_of(name: str) -> str:
    """The IPv4 address of a device: its GIDs have it."""
    (found,) = (each for each in devices() if each.name == name)
    gids = (ipaddress.IPv6Address(gid) for port in found.ports for _, gid in port.gids)
    return next(str(gid.ipv4_mapped) for gid in gids if gid.ipv4_mapped)


def free_port() -> int:
    """One that no other test of this process listens at."""
    return next(_ports)


@dataclass
class Side:
    """A device with a domain on it."""

    address: str
    device: Device
    domain: ResourceDomain
    cq: CompletionQueue

    def queue_pair(self, receive_depth: int = 0, receive_size: int = 0) -> QueuePair:
        return self.domain.queue_pair(self.cq, receive_depth=receive_depth, receive_size=receive_size)


@contextlib.asynccontextmanager
async def side_on(name: str, model: ThreadModel = ThreadModel.SINGLE) -> AsyncIterator[Side]:
    async with (
        open_device(name) as device,
        device.resource_domain(thread_model=model) as domain,
        domain.completion_queue(1024) as cq,
    ):
        yield Side(address_of(name), device, domain, cq)


@contextlib.asynccontextmanager
async def sides(model: ThreadModel = ThreadModel.SINGLE) -> AsyncIterator[tuple[Side, Side]]:
    """Two devices, or one and the same."""
    names = rdma_devices()
    async with side_on(names[0], model) as near, side_on(names[-1], model) as far:
        yield near, far


async def connected(
    channel: Channel, listener: Listener, near: Side, qp: QueuePair, peer_qp: QueuePair
) -> tuple[Identifier, Identifier]:
    """The identifier of a connection from here to a listener's, and its identifier there."""
    asking = await channel.identifier().open()
    await asking.resolve(*listener.address[:2], source=near.address)

    async def answer() -> Identifier:
        asked = await anext(listener)
        await asked.accept(peer_qp, ACCESS)
        return asked

    _, asked = await asyncio.gather(asking.connect(qp, ACCESS), answer())
    assert asking.connected
    assert asked.connected
    assert qp.qp_state is peer_qp.qp_state is QpState.RTS
    return asking, asked


def counts() -> dict[str, dict[str, int]]:
    """What the kernel counts of each device: ``rdma resource show``."""
    told = subprocess.run(["rdma", "-j", "resource", "show"], check=True, capture_output=True, text=True, timeout=60)
    return {
        each["ifname"]: {kind: each[kind] for kind in ("cm_id", "qp", "cq", "mr")} for each in json.loads(told.stdout)
    }


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """The kernel counts afterwards what it did before."""
    before = counts()
    yield
    assert counts() == before
