"""Helpers for tests of rdma_cm: addresses, two ends with their domains, and the kernel's resource counts."""

import asyncio
import contextlib
import ipaddress
import itertools
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from aioverbs import AccessFlags, Device, QpState, QueuePair, ResourceDomain, ThreadModel, devices, open_device
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs.rdma_cm import Channel, Identifier, Listener
from tests.rdma.seam import rdma_devices

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
_ports = itertools.count(17000)


def address_of(name: str) -> str:
    """Return the IPv4 address of a device, taken from its GIDs."""
    (found,) = (each for each in devices() if each.name == name)
    gids = (ipaddress.IPv6Address(gid) for port in found.ports for _, gid in port.gids)
    return next(str(gid.ipv4_mapped) for gid in gids if gid.ipv4_mapped)


def free_port() -> int:
    """Return a port that no other test in this process uses."""
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
    """Open two devices, or the only one twice."""
    names = rdma_devices()
    async with side_on(names[0], model) as near, side_on(names[-1], model) as far:
        yield near, far


async def connected(
    channel: Channel, listener: Listener, near: Side, qp: QueuePair, peer_qp: QueuePair
) -> tuple[Identifier, Identifier]:
    """Connect two queue pairs; return the identifiers of the active and the passive side."""
    active = await channel.identifier().open()
    await active.resolve(*listener.address[:2], source=near.address)

    async def answer() -> Identifier:
        passive = await anext(listener)
        await passive.accept(peer_qp, ACCESS)
        return passive

    _, passive = await asyncio.gather(active.connect(qp, ACCESS), answer())
    assert active.connected
    assert passive.connected
    assert qp.qp_state is peer_qp.qp_state is QpState.RTS
    return active, passive


def established() -> int:
    """Return how many connections the kernel's connection managers established as the active side."""
    return sum(int(each.read_text()) for each in Path("/sys/class/infiniband").glob("*/ports/*/cm_tx_msgs/rtu"))


def counts() -> dict[str, dict[str, int]]:
    """Return the kernel's counts of resources by device: ``rdma resource show``."""
    shown = subprocess.run(["rdma", "-j", "resource", "show"], check=True, capture_output=True, text=True, timeout=60)
    return {
        each["ifname"]: {kind: each[kind] for kind in ("cm_id", "qp", "cq", "mr")} for each in json.loads(shown.stdout)
    }


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that the kernel's counts are the same before and after."""
    before = counts()
    yield
    assert counts() == before
